"""What a study compares, as its YAML says: models, seeds, budgets, where learning rates are searched, variants.

    group: study                      # folder of configs/experiment that has the models and variants
    models:                           # experiment: what tables and figures call it, in their order
      fox_pro: FoX (Pro)
      mamba2: Mamba-2
    slowest_first: [mamba2, fox_pro]  # the order in which searches start; default that of the models
    seeds: [0, 1, 2]                  # of runs and variants; searches have the first. Default: the experiments' own
    start_rate: 2.0e-3                # where each search of the grid {1, 2, 5} × 10^i starts; default: the experiment's
    learning_rates: {mamba2: 5.0e-3}  # of models whose best rate is known: they are not searched
    overrides:                        # of train.py, for
      runs: {train.max_tokens: 100663296}      # all; searches and variants add theirs
      search: {train.max_tokens: 6291456}
      variants: {train.max_tokens: 16777216}
    variants:                         # model: experiments that are run at its rate. The model itself may be one: it is
      fox_pro: [fox_pro, fox_pro_rope]       # run again where overrides has variants, else its run is used
    baseline: fox_pro                 # the variant that the others are compared with; default the first
    families:                         # of models whose noise is pooled and whose intervals hold at once; each has
      - [fox_pro, mamba2]             # the baseline too. Default: all models are one
    equal_loss: {fox_pro_muon: fox_pro}  # model: the other one whose final loss it may reach after fewer tokens
    claims:                           # what the study decides, each by a rule of claim_rules.py
      - claim: FoX reaches a lower loss than the Transformer
        rule: lower
        models: [fox_pro]             # one verdict for each
        than: transformer_pro         # the other model
        of: variants                  # whose losses; default runs
      - {claim: The loss keeps falling, rule: falls, models: [fox_pro], at: 0.5}  # position over training length
      - {claim: RoPE changes little, rule: same, models: [fox_pro_rope], than: fox_pro, within: 0.05}  # nats

Only `group` and `models` are required. studies/seven_models/study.yaml is the study of studies/seven_models/README.md.
"""

import dataclasses
import io
import math
import re
import typing
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.command_line import one_line
from forgetting_transformer.files import UnreadableError, read_yaml
from studies.engine.claim_rules import RULES


@dataclass(frozen=True)
class Claim:
    """What a study decides for each of some models; see the module docstring."""

    claim: str = ""
    rule: str = ""
    models: list[str] = field(default_factory=list)
    than: str | None = None
    of: str | None = None
    at: float | None = None
    within: float | None = None


@dataclass(frozen=True)
class StudyPlan:
    """A study's YAML; see the module docstring."""

    group: str
    models: dict[str, str]
    slowest_first: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    start_rate: float | None = None
    learning_rates: dict[str, float] = field(default_factory=dict)
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    variants: dict[str, list[str]] = field(default_factory=dict)
    baseline: str | None = None
    families: list[list[str]] = field(default_factory=list)
    equal_loss: dict[str, str] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    @property
    def names(self) -> dict[str, str]:
        """What tables call the models."""
        return dict(self.models)

    @property
    def start_order(self) -> list[str]:
        return list(self.slowest_first or self.models)

    def overrides_of(self, part: str) -> list[str]:
        """Overrides of "runs", "search" or "variants", as train.py takes them."""
        return [f"{key}={_text(key, value)}" for key, value in self.overrides.get(part, {}).items()]


#: What each key must be, for messages.
EXPECTED = {
    "group": "the name of a folder of configs/experiment",
    "models": "a mapping of experiments to their display names, such as {fox_pro: FoX (Pro)}",
    "slowest_first": "a list of the models, such as [mamba2, fox_pro]",
    "seeds": "a list of different whole numbers from 0 on, such as [0, 1, 2]",
    "start_rate": "a positive number, such as 2e-3",
    "learning_rates": "a mapping of models to positive numbers, such as {mamba2: 5e-3}",
    "overrides": "a mapping of runs, search or variants to overrides, such as {runs: {train.max_tokens: 1000000}}",
    "variants": "a mapping of models to lists of experiments, such as {fox_pro: [fox_pro, fox_pro_rope]}",
    "baseline": "the name of a model or variant",
    "families": "a list of lists of models, in which each model is, such as [[fox_pro, mamba2], [hybrid]]",
    "equal_loss": "a mapping of models to other models, such as {fox_pro_muon: fox_pro}",
    "claims": "a list of claims, such as [{claim: …, rule: lower, models: [fox_pro], than: transformer_pro}]",
}
PARTS = ("runs", "search", "variants")


def read_plan(file: Path) -> StudyPlan:
    """
    Raises:
        AnalysisError: the file is not there or says something else than a study does; names the file, key and value.
    """
    try:
        # OmegaConf's YAML, as in configs/: 2e-3 is a number there, and a key that stands twice is an error.
        content = read_yaml(file, lambda text: OmegaConf.to_container(OmegaConf.load(io.StringIO(text))))
    except UnreadableError as error:
        raise AnalysisError(str(error)) from error
    except (OSError, OmegaConfBaseException) as error:
        raise AnalysisError(f"{file} cannot be read as the YAML of a study: {one_line(error)}") from error
    try:
        plan = _typed(content)
        _check(plan)
        return plan
    except AnalysisError as error:
        raise AnalysisError(f"{file}: {error}") from error


def _typed(content: Any) -> StudyPlan:
    """
    Raises:
        AnalysisError: a key is unknown or missing, or its value is of another type.
    """
    _check_keys("the file", content, EXPECTED, "a mapping with the keys of a study")
    given = {key: value for key, value in content.items() if value is not None}
    for key in ("group", "models"):
        if given.get(key) in (None, "", {}):
            raise AnalysisError(f"{key} is missing; it must be {EXPECTED[key]}")
    for key in ("seeds", "slowest_first"):
        if given.get(key) == []:
            raise AnalysisError(f"{key}=[] must be {EXPECTED[key]}; leave it out for the default")
    if isinstance(given["models"], dict):
        given["models"] = {key: key if name is None else name for key, name in given["models"].items()}
    # Values of overrides are of any type, and their interpolations are the run's: they stay as they are.
    overrides = given.pop("overrides", {})
    _check_keys("overrides", overrides, PARTS, EXPECTED["overrides"])
    overrides = {part: {} if values is None else values for part, values in overrides.items()}
    for part, values in overrides.items():
        _check_keys(f"overrides.{part}", values, None, "a mapping of keys to values")
    typed = OmegaConf.structured(StudyPlan)
    for key, value in given.items():
        try:
            typed = OmegaConf.merge(typed, {key: value})
            typed[key]  # an interpolation is resolved here
        except OmegaConfBaseException as error:
            at = "" if error.full_key in ("", key) else f" (wrong is {error.full_key})"
            raise AnalysisError(f"{key}={value!r} must be {EXPECTED[key]}{at}") from error
    return dataclasses.replace(typing.cast(StudyPlan, OmegaConf.to_object(typed)), overrides=overrides)


def _check_keys(what: str, value: Any, known: Collection[str] | None, expected: str) -> None:
    if not isinstance(value, dict):
        raise AnalysisError(f"{what} must be {expected}, not {value!r}")
    for key in value:
        if not isinstance(key, str):
            raise AnalysisError(f"{what} has the key {key!r}, which is no text; quote it")
        if known is not None and key not in known:
            raise AnalysisError(f"{what} has an unknown key {key!r}; known are {', '.join(sorted(known))}")


def _check(plan: StudyPlan) -> None:
    """
    Raises:
        AnalysisError: a value is out of its range, or two keys do not fit together.
    """
    for model, name in plan.models.items():
        if not isinstance(name, str) or not name.strip():  # OmegaConf accepts a mapping for a text here
            raise AnalysisError(f"models.{model}={name!r} must be the text that tables call the model")
        if same := [other for other in plan.models if plan.models[other] == name and other != model]:
            raise AnalysisError(f"models.{model}={name!r} is also what {same[0]} is called; display names must differ")
    if sorted(plan.start_order) != sorted(plan.models):
        models = ", ".join(plan.models)
        raise AnalysisError(f"slowest_first={plan.slowest_first} must name each of the models once: {models}")
    if len(set(plan.seeds)) < len(plan.seeds) or any(seed < 0 for seed in plan.seeds):
        raise AnalysisError(f"seeds={plan.seeds} must be {EXPECTED['seeds']}")
    if plan.start_rate is not None and not (math.isfinite(plan.start_rate) and plan.start_rate > 0):
        raise AnalysisError(f"start_rate={plan.start_rate} must be {EXPECTED['start_rate']}")
    _check_keys("learning_rates", plan.learning_rates, plan.models, EXPECTED["learning_rates"])
    for model, rate in plan.learning_rates.items():
        if not (math.isfinite(rate) and rate > 0):
            raise AnalysisError(f"learning_rates.{model}={rate} must be a positive number, such as 2e-3")
    _check_keys("variants", plan.variants, plan.models, EXPECTED["variants"])
    for model, names in plan.variants.items():
        if not names or len(set(names)) < len(names):
            raise AnalysisError(f"variants.{model}={names} must name at least one experiment, and each once")
    known = {*plan.models, *(name for names in plan.variants.values() for name in names)}
    if plan.baseline is not None and plan.baseline not in known:
        raise AnalysisError(f"baseline={plan.baseline!r} must be a model or variant: {', '.join(sorted(known))}")
    in_families = {name for family in plan.families for name in family}
    for name in sorted(in_families ^ plan.models.keys()) if plan.families else ():
        wrong_with = "is in none of them" if name in plan.models else f"is none of the models: {', '.join(plan.models)}"
        raise AnalysisError(f"families={plan.families}: {name!r} {wrong_with}; it must be {EXPECTED['families']}")
    for model, other in plan.equal_loss.items():
        if not {model, other} <= set(plan.models) or model == other:
            raise AnalysisError(f"equal_loss.{model}={other!r} must name two of the models: {', '.join(plan.models)}")
    for number, claim in enumerate(plan.claims):
        try:
            _check_claim(claim, plan)
        except AnalysisError as error:
            raise AnalysisError(f"claims[{number}]: {error}") from error
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", plan.group):
        raise AnalysisError(f"group={plan.group!r} must be {EXPECTED['group']}")
    for key, experiments in {"models": plan.models, "variants": known}.items():
        if wrong := [name for name in experiments if not re.fullmatch(r"\w[\w.-]*", name)]:
            raise AnalysisError(f"{key}: {wrong[0]!r} must be the name of a file of configs/experiment/{plan.group}")
    for part in plan.overrides:
        try:
            for override in plan.overrides_of(part):
                _check_override(override)
        except AnalysisError as error:
            raise AnalysisError(f"overrides.{part}: {error}") from error


def _check_claim(claim: Claim, plan: StudyPlan) -> None:
    """
    Raises:
        AnalysisError: its rule is unknown, or a key is missing, too many or out of its range.
    """
    if not claim.claim.strip():
        raise AnalysisError("claim is missing; it must be a text that says what is claimed")
    if (rule := RULES.get(claim.rule)) is None:
        raise AnalysisError(f"rule={claim.rule!r} must be one of {', '.join(RULES)}")
    given = {key for key in ("than", "of", "at", "within") if getattr(claim, key) is not None}
    if missing := [key for key in rule.needs if key not in given]:
        raise AnalysisError(f"a claim of the rule {claim.rule} needs {', '.join(missing)}")
    if unused := sorted(given - {*rule.needs, *rule.may}):
        raise AnalysisError(f"a claim of the rule {claim.rule} has no {', '.join(unused)}")
    if claim.of not in (None, "runs", "variants"):
        raise AnalysisError(f"of={claim.of!r} must be runs or variants")
    of_variants = claim.of == "variants"
    known = {name for names in plan.variants.values() for name in names} if of_variants else {*plan.models}
    named = [*claim.models, *([] if claim.than is None else [claim.than])]
    if unknown := [name for name in named if name not in known]:
        kind = "variants" if of_variants else "models"
        raise AnalysisError(f"{unknown[0]!r} is none of the {kind}: {', '.join(sorted(known))}")
    if not claim.models or len(set(named)) < len(named):
        raise AnalysisError(
            f"models={claim.models} must name at least one model, and each once, and not {claim.than!r}"
        )
    if plan.families and rule.compares_losses and not of_variants:
        together = [{plan.baseline or next(iter(plan.models)), *family} for family in plan.families]
        for model in claim.models:
            if not any({model, claim.than} <= family for family in together):
                raise AnalysisError(f"{model} and {claim.than} are in no family together")
    if claim.at is not None and not (claim.at > 0 and math.log2(claim.at).is_integer()):
        raise AnalysisError(f"at={claim.at} must be a power of two, such as 0.5: octaves of positions end there")
    if claim.within is not None and not 0 < claim.within < math.inf:
        raise AnalysisError(f"within={claim.within} must be a positive number of nats")


def _check_override(override: str) -> None:
    """
    Raises:
        AnalysisError: train.py could not read the override, or would start several runs for it.
    """
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise AnalysisError(f"{override} is not an override of train.py: {reason}") from error
    if parsed.is_sweep_override():
        raise AnalysisError(f"{override} must be one value; a number has no commas, and a list has brackets")


def _text(key: str, value: Any) -> str:
    """The value of an override as Hydra reads it.

    Raises:
        AnalysisError: the value is a mapping.
    """
    if isinstance(value, dict):
        first = next(iter(value), "…")
        raise AnalysisError(f"{key}={value} is a group of keys; write each in full, as in {key}.{first}: …")
    if isinstance(value, list):
        return f"[{','.join(_text(key, item) for item in value)}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
