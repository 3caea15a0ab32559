"""The YAML of a study: what it compares, trains, evaluates and claims.

    group: study                      # folder of configs/experiment that has the models and variants
    models:                           # experiment: what tables and figures call it, in their order
      fox_pro: FoX (Pro)
      mamba2: Mamba-2
    slowest_first: [mamba2, fox_pro]  # the order in which searches start; default that of the models
    seeds: [0, 1, 2]                  # of runs and variants; searches have the first
    start_rate: 2.0e-3                # where each search of the grid {1, 2, 5} × 10^i starts; default: the experiment's
    learning_rates: {mamba2: 5.0e-3}  # of models whose best rate is known: they are not searched
    overrides:                        # of train.py, for
      runs: {train.max_tokens: 100663296}      # all; searches and variants add theirs
      search: {train.max_tokens: 6291456}
      variants: {train.max_tokens: 16777216}
    variants:                         # model: experiments that are run at its rate. The model itself may be one: it is
      fox_pro: [fox_pro, fox_pro_rope]       # run again where overrides has variants, else its run is used
    baseline: fox_pro                 # the model that the others are compared with; default the first
    families:                         # of models whose noise is pooled and whose intervals hold at once; each has
      - [fox_pro, mamba2]             # the baseline too. Default: all models are one
    claims:                           # the predictions that the study decides, each by a rule of claims.py
      - claim: FoX reaches a lower loss than the Transformer
        rule: lower
        models: [fox_pro]             # one verdict for each
        than: transformer_pro         # the other model
        of: variants                  # whose losses; default runs
      - {claim: The loss keeps falling, rule: falls, models: [fox_pro], at: 0.5}  # position over training length
      - {claim: RoPE changes little, rule: same, models: [fox_pro_rope], than: fox_pro, within: 0.05}  # nats
    corpus: {doc_len: 32768}          # see Corpus below
    jobs_per_gpu: 3                   # runs that share a GPU
    evaluations_per_gpu: 4
    eval_batch: 4                     # texts that an evaluation of the loss at every position runs together
    speed_seeds: [0]                  # seeds timed with and without pruning, each alone on a GPU; default none

Only `group` and `models` are required. studies/three_seeds/study.yaml is an example.
"""

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.command_line import one_line
from forgetting_transformer.files import UnreadableError, read_yaml

#: Rule of a claim (claims.py) -> keys that it needs besides `claim`, `rule` and `models`.
RULES: dict[str, tuple[str, ...]] = {
    "falls": ("at",),
    "rises": ("at",),
    "falls_behind": ("at", "than"),
    "lower": ("than",),
    "higher": ("than",),
    "same": ("than", "within"),
    "same_unpruned": ("within",),
    "local_heads": (),
    "global_heads": (),
    "more_global_heads": (),
    "prunes_more": (),
    "prunes_faster": (),
    "sooner": ("than",),
}


@dataclass
class Claim:
    """A decision about each of some models; see the module docstring."""

    claim: str
    rule: str
    models: list[str]
    than: str | None = None
    of: str = "runs"
    at: float | None = None
    within: float | None = None

    @property
    def kind(self) -> str:
        """The part of a study.json that has its models."""
        return "variants" if self.of == "variants" else "models"


@dataclass
class Corpus:
    """Rows of the Python sources of this machine that the stage `corpus` prepares, without near-duplicates.

    Attributes:
        doc_len, heldout_docs: tokens of a row, and rows that are held out.
    """

    doc_len: int = 16384
    heldout_docs: int = 128


@dataclass
class StudyPlan:
    """A study's YAML; see the module docstring."""

    group: str
    models: dict[str, str]
    slowest_first: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    start_rate: float | None = None
    learning_rates: dict[str, float] = field(default_factory=dict)
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    variants: dict[str, list[str]] = field(default_factory=dict)
    baseline: str | None = None
    families: list[list[str]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    corpus: Corpus = field(default_factory=Corpus)
    jobs_per_gpu: int = 3
    evaluations_per_gpu: int = 4
    eval_batch: int = 4
    speed_seeds: list[int] = field(default_factory=list)

    def overrides_of(self, part: str) -> list[str]:
        """Overrides of "runs", "search" or "variants", as train.py takes them."""
        return [f"{key}={_text(value)}" for key, value in self.overrides.get(part, {}).items()]

    def name(self, model: str) -> str:
        """Name of a model or variant in tables and figures."""
        return self.models.get(model, model)


def read_plan(file: Path) -> StudyPlan:
    """
    Raises:
        AnalysisError: the file is not there or says something else than a study does; names the file, key and value.
    """
    try:
        # OmegaConf's YAML, as in configs/: 2e-3 is a number there, and a key that stands twice is an error.
        content = read_yaml(file, lambda text: OmegaConf.load(io.StringIO(text)))
        plan = cast(StudyPlan, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(StudyPlan), content)))
    except UnreadableError as error:
        raise AnalysisError(str(error)) from error
    except (OSError, OmegaConfBaseException, ValueError) as error:
        raise AnalysisError(f"{file} is no study: {one_line(error)}; see studies/engine/plan.py") from error
    try:
        _check(plan)
    except AnalysisError as error:
        raise AnalysisError(f"{file}: {error}") from error
    return plan


def _check(plan: StudyPlan) -> None:
    """
    Raises:
        AnalysisError: keys do not fit each other.
    """
    known = {"runs": {*plan.models}, "variants": {name for names in plan.variants.values() for name in names}}
    if not plan.models:
        raise AnalysisError("models is empty; name at least one experiment, as in {fox_pro: FoX (Pro)}")
    if plan.slowest_first and sorted(plan.slowest_first) != sorted(plan.models):
        raise AnalysisError(f"slowest_first={plan.slowest_first} must name each of {', '.join(plan.models)} once")
    if not plan.seeds or len({*plan.seeds}) < len(plan.seeds) or min(plan.seeds) < 0:
        raise AnalysisError(f"seeds={plan.seeds}: give at least one, each once and none negative")
    if wrong := [f"{model}: {rate:g}" for model, rate in plan.learning_rates.items() if not 0 < rate < math.inf]:
        raise AnalysisError(f"learning_rates: {wrong[0]} must be a positive number")
    if unknown := plan.overrides.keys() - {"runs", "search", "variants"}:
        raise AnalysisError(f"overrides has {', '.join(unknown)}; it may have runs, search and variants")
    every = known["runs"] | known["variants"]
    named: dict[str, tuple[Iterable[str], set[str]]] = {
        "variants": (plan.variants, known["runs"]),
        "learning_rates": (plan.learning_rates, known["runs"]),
        "baseline": ([plan.baseline] if plan.baseline is not None else [], every),
        "families": ([model for family in plan.families for model in family], known["runs"]),
    }
    for key, (names, among) in named.items():
        if missing := [name for name in names if name not in among]:
            raise AnalysisError(f"{key}: {missing[0]!r} is none of {', '.join(sorted(among))}")
    for claim in plan.claims:
        what = f"the claim {claim.claim!r}"
        if (needs := RULES.get(claim.rule)) is None:
            raise AnalysisError(f"{what}: rule={claim.rule!r} must be one of {', '.join(RULES)}")
        given = {key for key in ("than", "at", "within") if getattr(claim, key) is not None}
        if given != {*needs}:
            raise AnalysisError(f"{what}: the rule {claim.rule} needs {' and '.join(needs) or 'no more keys'}")
        if claim.of not in known:
            raise AnalysisError(f"{what}: of={claim.of!r} must be runs or variants")
        for name in [*claim.models, *([] if claim.than is None else [claim.than])]:
            if name not in known[claim.of]:
                raise AnalysisError(f"{what}: {name!r} is none of {', '.join(sorted(known[claim.of]))}")
        if claim.at is not None and not (claim.at > 0 and math.log2(claim.at).is_integer()):
            raise AnalysisError(f"{what}: at={claim.at} must be a power of two, such as 0.5: octaves end there")


def _text(value: Any) -> str:
    """The value of an override as Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
