"""How the best learning rate and the loss move with a model's size: power laws through a few sizes, with intervals.

At each size, the best rate is the vertex of a parabola of the loss in log(rate) around the best rate of the grid:

    loss(x) = a + b (x - x0)^2,   x = log(rate)

Without a vertex it is a point of the grid, and known only to lie between its neighbours there.

Over the sizes, log(best rate) and log(loss) are straight lines in log(parameters) and log(compute), by least squares.
The intervals are Student's, at 95 %: they have n - 2 degrees of freedom for n sizes, one for three sizes, where t is
12.7. Best rates that are points of the grid add the variance of a rate that lies anywhere between the neighbours,
log-uniform, to that of the residuals. The intervals hold if the law holds; far from the sizes that were measured nobody
knows that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forgetting_transformer.analysis.statistics import quantile
from forgetting_transformer.analysis.tables import Table

#: Points on either side of the grid's best rate that the parabola goes through.
_NEIGHBOURS = 2


@dataclass(frozen=True)
class Size:
    """What was found at one size.

    Attributes:
        name: of the scale.
        parameters: outside of the embedding and the head's matrix.
        compute: FLOPs of training, each run.
        losses: learning rate -> loss of each seed in nats per token, infinite where a run diverged.
        complete: whether the search is; otherwise its best rate may be any, and no law goes through it.
    """

    name: str
    parameters: float
    compute: float
    losses: Mapping[float, Sequence[float]]
    complete: bool = True


@dataclass(frozen=True)
class Optimum:
    """The best learning rate of one size.

    Attributes:
        rate, loss: at the vertex of the parabola, or of the best rate of the grid where there is no vertex near it.
        low, high: its neighbours in the grid, diverged or not, between which it lies; NaN where there is none.
        curvature: b of the parabola; NaN where it has no minimum between them.
    """

    rate: float
    loss: float
    low: float
    high: float
    curvature: float = math.nan

    @property
    def vertex(self) -> bool:
        return not math.isnan(self.curvature)


@dataclass(frozen=True)
class PowerLaw:
    """y = factor * x ** exponent, fitted in logarithms.

    Attributes:
        half_width: of the exponent's 95 % interval, NaN where nothing is known of it: with two points, or where one of
            them has no bound.
    """

    factor: float
    exponent: float
    half_width: float
    _centre: float
    _spread: float
    _points: int

    def at(self, x: float) -> float:
        return self.factor * x**self.exponent

    def interval(self, x: float) -> tuple[float, float]:
        """Where a new measurement at x lies with 95 %: wider the farther x is from the points; NaN as `half_width`."""
        away = math.log(x) - self._centre
        half = self.half_width * math.sqrt(self._spread * (1 + 1 / self._points) + away**2)
        factor = math.exp(min(half, 700)) if math.isfinite(half) else math.nan
        return self.at(x) / factor, self.at(x) * factor


def optimum(losses: Mapping[float, Sequence[float]]) -> Optimum | None:
    """The best rate of a search; None where no rate has a loss.

    Args:
        losses: learning rate -> loss of each seed.
    """
    means = {rate: float(np.mean(values)) for rate, values in sorted(losses.items())}
    rates = [rate for rate, loss in means.items() if math.isfinite(loss)]
    if not rates:
        return None
    best = min(rates, key=lambda rate: means[rate])
    place = rates.index(best)
    near = rates[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1]
    low = max((rate for rate in means if rate < best), default=math.nan)
    # Past rates that are as good.
    high = min((rate for rate in means if rate > best and means[rate] > means[best]), default=math.nan)
    if len(near) >= 3:
        x = np.log(near) - math.log(best)
        # The closer to the best, the more a point counts: far from it the loss is no parabola.
        weights = 1 / (1 + (x / math.log(2)) ** 2)
        curvature, slope, level = np.polyfit(x, [means[rate] for rate in near], 2, w=weights)
        first, last = rates[max(0, place - 1)], rates[min(len(rates) - 1, place + 1)]
        if curvature > 0 and math.log(first / best) <= (shift := -slope / (2 * curvature)) <= math.log(last / best):
            loss = float(level - slope**2 / (4 * curvature))
            return Optimum(float(best * math.exp(shift)), loss, low, high, float(curvature))
    return Optimum(best, means[best], low, high)


def power_law(
    x: Sequence[float], y: Sequence[float], cells: Sequence[tuple[float, float] | None] | None = None
) -> PowerLaw:
    """The power law through points; at least two with different x, all positive.

    Args:
        cells: for each point, between which values y is known to lie, NaN for no bound; None for y itself.
    """
    logs, values, points = np.log(x), np.log(y), len(x)
    centre = float(logs.mean())
    spread = float(((logs - centre) ** 2).sum())
    exponent = float(values @ (logs - centre) / spread)
    half = math.nan
    if points > 2:
        residuals = values - values.mean() - exponent * (logs - centre)
        of_grid = [math.log(cell[1] / cell[0]) ** 2 / 12 if cell else 0.0 for cell in cells or [None] * points]
        variance = float((residuals**2).sum()) / (points - 2) + float(np.mean(of_grid))
        half = quantile(points - 2) * math.sqrt(variance / spread)
    return PowerLaw(math.exp(float(values.mean()) - exponent * centre), exponent, half, centre, spread, points)


@dataclass(frozen=True)
class Fit:
    """Laws through the sizes of a ladder, from the smallest to the largest.

    Attributes:
        sizes, optima: that have a best rate.
        rate: of the best rate in parameters; loss: of its loss in compute. Through sizes whose search is complete;
            None with fewer than two.
        full: name -> parameters of the sizes that are not shrunk, to which `rate` is extrapolated.
    """

    sizes: Sequence[Size]
    optima: Sequence[Optimum]
    rate: PowerLaw | None
    loss: PowerLaw | None
    full: Mapping[str, float]

    def extrapolated(self) -> list[tuple[str, float, float, tuple[float, float]]]:
        """Name, parameters, best rate and its interval, of the sizes that are not shrunk."""
        law = self.rate
        return [] if law is None else [(name, n, law.at(n), law.interval(n)) for name, n in self.full.items()]

    def table(self) -> Table:
        """The best rates, and what the law says of the sizes that are not shrunk, marked as extrapolated."""
        rows = []
        for size, best in zip(self.sizes, self.optima, strict=True):
            note = "" if best.vertex else "grid point: no parabola has its minimum beside it"
            note = note if size.complete else "**search not finished**, left out of the laws"
            between = f"{best.low:.2g} to {best.high:.2g}".replace("nan", "unknown")
            sizes = [f"{size.name}, shrunk", f"{size.parameters:,.0f}", f"{size.compute:.2e}"]
            rows.append([*sizes, f"{best.rate:.2e}", between, f"{best.loss:.4f}", note])
        for name, parameters, rate, (low, high) in self.extrapolated():
            around = "unknown" if math.isnan(low) else f"{low:.1e} to {high:.1e}"
            rows.append([name, f"{parameters:,.0f}", "", f"{rate:.2e}", around, "", "**extrapolated**"])
        header = ["size", "parameters", "FLOPs", "best rate", "between", "loss", "note"]
        return Table(header, rows, "lrrrrrl").without_empty_columns()

    def notes(self) -> list[str]:
        """What the laws say and how far to trust them."""
        laws = (("best rate ~ parameters", self.rate), ("loss ~ compute", self.loss))
        found = [
            f"{name}^{law.exponent:.3f}" + ("" if math.isnan(law.half_width) else f" ± {law.half_width:.3f}")
            for name, law in laws
            if law is not None
        ]
        few = sum(size.complete for size in self.sizes)
        trust = "two points have no interval" if few < 3 else f"Student's t with {few - 2} degrees of freedom"
        return [*found, f"{few} sizes: {trust}"] if found else []


def fit(sizes: Sequence[Size], full: Mapping[str, float]) -> Fit:
    """Laws through what was found at several sizes.

    Args:
        full: name -> parameters of the sizes that are not shrunk.
    """
    pairs = [(size, best) for size in sizes if (best := optimum(size.losses)) is not None]
    finished = [(size, best) for size, best in pairs if size.complete]
    rate = loss = None
    parameters, compute = [size.parameters for size, _ in finished], [size.compute for size, _ in finished]
    if len(set(parameters)) > 1:
        cells = [None if best.vertex else (best.low, best.high) for _, best in finished]
        rate = power_law(parameters, [best.rate for _, best in finished], cells)
    if len(set(compute)) > 1 and all(map(math.isfinite, compute)):
        loss = power_law(compute, [best.loss for _, best in finished])
    return Fit([size for size, _ in pairs], [best for _, best in pairs], rate, loss, full)
