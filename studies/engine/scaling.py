"""How the best learning rate and the loss move with a model's size: power laws through a few sizes, with intervals.

At each size, the best rate is the vertex of a parabola of the loss in log(rate) around the best rate of the grid:

    loss(x) = a + b (x - x0)^2,   x = log(rate)

Without a vertex it is a point of the grid, and known only to lie between its neighbours there.

Over the sizes, log(best rate) and log(loss) are straight lines in log(parameters) and log(compute), by least squares.
The intervals are Student's, at 95 %: they have n - 2 degrees of freedom for n sizes, one for three sizes, where t is
12.7. Where best rates are points of the grid, the lines are fitted to many draws, log-uniform between the neighbours,
and the intervals are those of the mixture, around the line through the points themselves (multiple imputation: Rubin,
Multiple Imputation for Nonresponse in Surveys, 1987). They hold if the law holds; far from the sizes that were measured
nobody knows that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forgetting_transformer.analysis.statistics import CONFIDENCE, quantile
from forgetting_transformer.analysis.tables import Table

#: Points on either side of the grid's best rate that the parabola goes through.
_NEIGHBOURS = 2
#: Draws of the best rates that are points of a grid, and their seed.
_DRAWS, _SEED = 500, 0
#: What a table says of a size whose search is not complete.
_UNFINISHED = "**search not finished**, left out of the laws"


@dataclass(frozen=True)
class Size:
    """What was found at one size.

    Attributes:
        name: of the scale.
        parameters: outside of the embedding and the head's matrix.
        tokens: of training, each run.
        compute: FLOPs of training, each run.
        losses: learning rate -> loss of each seed in nats per token, infinite where a run diverged.
        complete: whether the search is; otherwise its best rate may be any, and no law goes through it.
    """

    name: str
    parameters: float
    tokens: float
    compute: float
    losses: Mapping[float, Sequence[float]]
    complete: bool = True


@dataclass(frozen=True)
class Optimum:
    """The best learning rate of one size.

    Attributes:
        rate, loss: at the vertex of the parabola, or of the best rate of the grid where there is no vertex near it.
        low, high: its neighbours in the grid, diverged or not, between which it lies; NaN where there is none.
        vertex: whether a parabola has a minimum between them.
        curvature: b of the parabola; NaN without one.
    """

    rate: float
    loss: float
    low: float
    high: float
    vertex: bool
    curvature: float = math.nan

    @property
    def between(self) -> str:
        """Its neighbours, for a table."""
        if math.isnan(self.low) and math.isnan(self.high):
            return "unknown"
        if math.isnan(self.low) or math.isnan(self.high):
            return f"below {self.high:.2g}" if math.isnan(self.low) else f"above {self.low:.2g}"
        return f"{self.low:.2g} to {self.high:.2g}"


@dataclass(frozen=True, eq=False)
class PowerLaw:
    """y = factor * x ** exponent, fitted in logarithms.

    Attributes:
        exponent, half_width: of the exponent's 95 % interval, NaN where nothing is known of it: with two points, or
            where one of them has no bound.
    """

    factor: float
    exponent: float
    half_width: float
    _centre: float
    _spread: float
    _points: int
    #: Of the lines through the draws, each `(draws,)`: the value at the centre, the slope, the residual.
    _levels: np.ndarray
    _slopes: np.ndarray
    _residuals: np.ndarray

    def at(self, x: float) -> float:
        return self.factor * x**self.exponent

    def interval(self, x: float) -> tuple[float, float]:
        """Where a new measurement at x lies with 95 %: wider the farther x is from the points; NaN as `half_width`."""
        if math.isnan(self.half_width):
            return math.nan, math.nan
        away = math.log(x) - self._centre
        scale = math.sqrt(1 + 1 / self._points + away**2 / self._spread)
        apart = self._levels + self._slopes * away - math.log(self.at(x))
        half = _half_width(apart, self._residuals * scale, self._points - 2)
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
            return Optimum(float(best * math.exp(shift)), loss, low, high, True, float(curvature))
    return Optimum(best, means[best], low, high, False)


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
    ends = np.log([cell or (value, value) for cell, value in zip(cells or [None] * points, y, strict=True)])
    drawn = values[None]
    if (ends[:, 0] < ends[:, 1]).any():
        drawn = ends[:, 0] + (ends[:, 1] - ends[:, 0]) * np.random.default_rng(_SEED).uniform(size=(_DRAWS, points))
    levels, slopes = drawn.mean(axis=1), drawn @ (logs - centre) / spread
    residuals, half = np.full(len(drawn), math.nan), math.nan
    exponent = float(values @ (logs - centre) / spread)
    if points > 2 and np.isfinite(ends).all():
        lines = levels[:, None] + slopes[:, None] * (logs - centre)
        residuals = np.sqrt(((drawn - lines) ** 2).sum(axis=1) / (points - 2))
        half = _half_width(slopes - exponent, residuals / math.sqrt(spread), points - 2)
    factor = math.exp(float(values.mean()) - exponent * centre)
    return PowerLaw(factor, exponent, half, centre, spread, points, levels, slopes, residuals)


def _half_width(apart: np.ndarray, scales: np.ndarray, freedom: int) -> float:
    """The h for which [-h, h] holds 95 % of a mixture, in equal parts, of Student's t at `apart` with these scales."""
    from scipy.special import stdtr  # as in statistics.py

    scales = np.maximum(scales, np.finfo(float).tiny)
    low, high = 0.0, float(np.abs(apart).max() + quantile(freedom) * scales.max())
    for _ in range(50):
        half = (low + high) / 2
        inside = stdtr(freedom, (half - apart) / scales) - stdtr(freedom, (-half - apart) / scales)
        low, high = (half, high) if inside.mean() < CONFIDENCE else (low, half)
    return high


@dataclass(frozen=True)
class Fit:
    """Laws through the sizes of a ladder, from the smallest to the largest.

    Attributes:
        sizes, optima: that have a best rate.
        rate: of the best rate in parameters; loss: of its loss in compute. Through sizes whose search is complete;
            None with fewer than two.
        full: name -> parameters of the sizes that are not shrunk, to which `rate` is extrapolated.
        unfinished: name -> parameters of the sizes, with a best rate or without, whose search is not complete.
    """

    sizes: Sequence[Size]
    optima: Sequence[Optimum]
    rate: PowerLaw | None
    loss: PowerLaw | None
    full: Mapping[str, float]
    unfinished: Mapping[str, float]

    def numbers(self) -> list[tuple[str, float, dict[str, float]]]:
        """Name, parameters and numbers by metric: of the sizes, the extrapolated ones and the laws."""
        rows = []
        for size, best in self._finished():
            bounds = {"best_rate_low": best.low, "best_rate_high": best.high}
            values = {"best_rate": best.rate, **bounds, "loss": best.loss, "compute": size.compute}
            rows.append((size.name, size.parameters, values))
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
            note = note if size.complete else _UNFINISHED
            flops = f"{size.compute:.2e}" if math.isfinite(size.compute) else ""
            rows.append(
                [
                    f"{size.name}, shrunk",
                    f"{size.parameters:,.0f}",
                    flops,
                    f"{best.rate:.2e}",
                    best.between,
                    f"{best.loss:.4f}",
                    note,
                ]
            )
        shown = [size.name for size in self.sizes]
        for name, parameters in self.unfinished.items():
            if name not in shown:
                rows.append([f"{name}, shrunk", f"{parameters:,.0f}", "", "", "", "", _UNFINISHED])
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
            few, point = len(self._finished()), any(not best.vertex for _, best in self._finished())
            found.append(
                f"{few} sizes"
                + (": two points have no interval" if few < 3 else f", Student's t with {few - 2} degrees of freedom")
                + (", and the grid's width where the best rate is a grid point" if few > 2 and point else "")
            )
        if self.unfinished:
            found.append(f"not finished, left out of the laws: {', '.join(self.unfinished)}")
        return found

    def _finished(self) -> list[tuple[Size, Optimum]]:
        return [pair for pair in zip(self.sizes, self.optima, strict=True) if pair[0].complete]


def fit(sizes: Sequence[Size], full: Mapping[str, float]) -> Fit:
    """Laws through what was found at several sizes.

    Args:
        full: name -> parameters of the sizes that are not shrunk.
    """
    pairs = [(size, best) for size in sizes if (best := optimum(size.losses)) is not None]
    kept, optima = [size for size, _ in pairs], [best for _, best in pairs]
    finished = [(size, best) for size, best in pairs if size.complete]
    rate = loss = None
    parameters, compute = [size.parameters for size, _ in finished], [size.compute for size, _ in finished]
    if len(set(parameters)) > 1:
        cells = [None if best.vertex else (best.low, best.high) for _, best in finished]
        rate = power_law(parameters, [best.rate for _, best in finished], cells)
    if len(set(compute)) > 1 and all(map(math.isfinite, compute)):
        loss = power_law(compute, [best.loss for _, best in finished])
    unfinished = {size.name: size.parameters for size in sizes if not size.complete}
    return Fit(kept, optima, rate, loss, full, unfinished)


def _with_interval(law: PowerLaw) -> str:
    return f"{law.exponent:.3f}" + ("" if math.isnan(law.half_width) else f" ± {law.half_width:.3f}")
