"""How the best learning rate and the loss move with a model's size: power laws through a few sizes, with intervals.

At each size, the best rate is the vertex of a parabola of the loss in log(rate) around the best rate of the grid:

    loss(x) = a + b (x - x0)^2,   x = log(rate)

Over the sizes, log(best rate) and log(loss) are straight lines in log(parameters) and log(compute), by least squares.
The intervals are Student's, at 95 %: they have n - 2 degrees of freedom for n sizes, one for three sizes, where t is
12.7. They hold if the law holds; far from the sizes that were measured nobody knows that.
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
        tokens: of training, each run.
        compute: FLOPs of training, each run.
        losses: learning rate -> loss of each seed in nats per token, infinite where a run diverged.
    """

    name: str
    parameters: float
    tokens: float
    compute: float
    losses: Mapping[float, Sequence[float]]


@dataclass(frozen=True)
class Optimum:
    """The best learning rate of one size.

    Attributes:
        rate, loss: at the vertex of the parabola, or of the best rate of the grid where there is no vertex near it.
        low, high: its neighbours in the grid, between which it lies.
        vertex: whether a parabola has a minimum between them.
        curvature: b of the parabola; NaN without one.
    """

    rate: float
    loss: float
    low: float
    high: float
    vertex: bool
    curvature: float = math.nan


@dataclass(frozen=True)
class PowerLaw:
    """y = factor * x ** exponent, fitted in logarithms.

    Attributes:
        exponent, half_width: of the exponent's 95 % interval, NaN with two points, which say nothing of it.
    """

    factor: float
    exponent: float
    half_width: float
    _centre: float
    _spread: float
    _residual: float
    _points: int

    def at(self, x: float) -> float:
        return self.factor * x**self.exponent

    def interval(self, x: float) -> tuple[float, float]:
        """Where a new measurement at x lies with 95 %: wider the farther x is from the points; NaN with two points."""
        if self._points < 3:
            return math.nan, math.nan
        away = (math.log(x) - self._centre) ** 2 / self._spread
        half = quantile(self._points - 2) * self._residual * math.sqrt(1 + 1 / self._points + away)
        # Beyond the range of floats an end says no more than that.
        return tuple(math.exp(min(max(math.log(self.at(x)) + s * half, -700), 700)) for s in (-1, 1))  # type: ignore[return-value]


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
    low, high = rates[max(0, place - 1)], rates[min(len(rates) - 1, place + 1)]
    if len(near) >= 3:
        x = np.log(near) - math.log(best)
        # The closer to the best, the more a point counts: far from it the loss is no parabola.
        weights = 1 / (1 + (x / math.log(2)) ** 2)
        curvature, slope, level = np.polyfit(x, [means[rate] for rate in near], 2, w=weights)
        if curvature > 0 and math.log(low / best) <= (shift := -slope / (2 * curvature)) <= math.log(high / best):
            loss = float(level - slope**2 / (4 * curvature))
            return Optimum(float(best * math.exp(shift)), loss, low, high, True, float(curvature))
    return Optimum(best, means[best], low, high, False)


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """The power law through points; at least two with different x, all positive."""
    logs, values = np.log(x), np.log(y)
    centre = float(logs.mean())
    spread = float(((logs - centre) ** 2).sum())
    exponent = float(((logs - centre) * values).sum() / spread)
    level = float(values.mean()) - exponent * centre
    residual = half = math.nan
    if len(logs) > 2:
        residual = math.sqrt(float(((values - level - exponent * logs) ** 2).sum()) / (len(logs) - 2))
        half = quantile(len(logs) - 2) * residual / math.sqrt(spread)
    return PowerLaw(math.exp(level), exponent, half, centre, spread, residual, len(logs))


@dataclass(frozen=True)
class Fit:
    """Laws through the sizes of a ladder, from the smallest to the largest.

    Attributes:
        sizes, optima: that have a best rate.
        rate: of the best rate in parameters; loss: of its loss in compute. None with fewer than two sizes.
        full: name -> parameters of the sizes that are not shrunk, to which `rate` is extrapolated.
    """

    sizes: Sequence[Size]
    optima: Sequence[Optimum]
    rate: PowerLaw | None
    loss: PowerLaw | None
    full: Mapping[str, float]

    def numbers(self) -> list[tuple[str, float, dict[str, float]]]:
        """Name, parameters and numbers by metric: of the sizes, the extrapolated ones and the laws."""
        rows = [
            (size.name, size.parameters, {"best_rate": best.rate, "loss": best.loss, "compute": size.compute})
            for size, best in zip(self.sizes, self.optima, strict=True)
        ]
        if self.rate is not None:
            for name, parameters in self.full.items():
                low, high = self.rate.interval(parameters)
                values = {"extrapolated_rate": self.rate.at(parameters), "low_95": low, "high_95": high}
                rows.append((name, parameters, values))
            rows.append(
                ("rate ~ parameters", 0, {"exponent": self.rate.exponent, "half_width_95": self.rate.half_width})
            )
        if self.loss is not None:
            rows.append(("loss ~ compute", 0, {"exponent": self.loss.exponent, "half_width_95": self.loss.half_width}))
        return rows

    def table(self) -> Table:
        """The best rates, and what the law says of the sizes that are not shrunk, marked as extrapolated."""
        rows = []
        for size, best in zip(self.sizes, self.optima, strict=True):
            note = "" if best.vertex else "grid point: no parabola has its minimum beside it"
            between = f"{best.low:.2g} to {best.high:.2g}"
            flops = f"{size.compute:.2e}" if math.isfinite(size.compute) else ""
            rows.append(
                [
                    f"{size.name}, shrunk",
                    f"{size.parameters:,.0f}",
                    flops,
                    f"{best.rate:.2e}",
                    between,
                    f"{best.loss:.4f}",
                    note,
                ]
            )
        if self.rate is not None:
            for name, parameters in self.full.items():
                low, high = self.rate.interval(parameters)
                around = "unknown" if math.isnan(low) else f"{low:.1e} to {high:.1e}"
                rows.append(
                    [name, f"{parameters:,.0f}", "", f"{self.rate.at(parameters):.2e}", around, "", "**extrapolated**"]
                )
        header = ["size", "parameters", "FLOPs", "best rate", "between", "loss", "note"]
        return Table(header, rows, "lrrrrrl").without_empty_columns()

    def notes(self) -> list[str]:
        """What the laws say and how far to trust them."""
        found = []
        if self.rate is not None:
            found.append(f"best rate ~ parameters^{_with_interval(self.rate)}")
        if self.loss is not None:
            found.append(f"loss ~ compute^{_with_interval(self.loss)}")
        if found:
            few = len(self.sizes)
            found.append(
                f"{few} sizes"
                + (": two points have no interval" if few < 3 else f", Student's t with {few - 2} degrees of freedom")
            )
        return found


def fit(sizes: Sequence[Size], full: Mapping[str, float]) -> Fit:
    """Laws through what was found at several sizes.

    Args:
        full: name -> parameters of the sizes that are not shrunk.
    """
    pairs = [(size, best) for size in sizes if (best := optimum(size.losses)) is not None]
    kept, optima = [size for size, _ in pairs], [best for _, best in pairs]
    rate = loss = None
    if len({size.parameters for size in kept}) > 1:
        rate = power_law([size.parameters for size in kept], [best.rate for best in optima])
    compute = [size.compute for size in kept]
    if len(set(compute)) > 1 and all(map(math.isfinite, compute)):
        loss = power_law(compute, [best.loss for best in optima])
    return Fit(kept, optima, rate, loss, full)


def _with_interval(law: PowerLaw) -> str:
    return f"{law.exponent:.3f}" + ("" if math.isnan(law.half_width) else f" ± {law.half_width:.3f}")
