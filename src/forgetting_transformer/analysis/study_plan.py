"""What a study compares, as its YAML says: models, seeds, budgets, where learning rates are searched, variants.

    group: study                      # folder of configs/experiment that has the models and variants
    models:                           # experiment: what tables and figures call it, in their order
      fox_pro: FoX (Pro)
      mamba2: Mamba-2
    slowest_first: [mamba2, fox_pro]  # the order in which searches start; default that of the models
    seeds: [0, 1, 2]                  # of runs and variants; searches have the first. Default: the experiments' own
    start_rate: 2.0e-3                # where each search of the grid {1, 2, 5} × 10^i starts; default: the experiment's
    overrides:                        # of train.py, for
      runs: {train.max_tokens: 100663296}      # all; those of searches and variants come on top
      search: {train.max_tokens: 6291456}
      variants: {train.max_tokens: 16777216}
    variants:                         # model: experiments that are run at its rate, itself among them if named
      fox_pro: [fox_pro, fox_pro_rope]
    baseline: fox_pro                 # the variant that the others are compared with; default the first

Only `group` and `models` are required. studies/seven_models/study.yaml is the study of studies/seven_models/README.md.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from forgetting_transformer.analysis import AnalysisError

PARTS = ("runs", "search", "variants")


@dataclass(frozen=True)
class StudyPlan:
    """A study's YAML; see the module docstring."""

    group: str
    models: Mapping[str, str]
    slowest_first: Sequence[str] = ()
    seeds: Sequence[int] = ()
    start_rate: float | None = None
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    variants: Mapping[str, Sequence[str]] = field(default_factory=dict)
    baseline: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """What tables call the models."""
        return dict(self.models)

    @property
    def start_order(self) -> list[str]:
        return list(self.slowest_first or self.models)

    def overrides_of(self, part: str) -> list[str]:
        """Overrides of "runs", "search" or "variants", as train.py takes them."""
        return [f"{key}={_text(value)}" for key, value in self.overrides.get(part, {}).items()]


def read_plan(file: Path) -> StudyPlan:
    """
    Raises:
        AnalysisError: the file is not there or says something else than a study does; names the key.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise AnalysisError(f"{file} cannot be read as the YAML of a study: {error}") from error
    known = {item.name for item in dataclasses.fields(StudyPlan)}
    _check_mapping(file, "the file", content, known)
    for key in ("group", "models"):
        if not content.get(key):
            raise AnalysisError(f"{file}: {key} is missing; a study names its group of experiments and its models")
    _check_mapping(file, "models", content["models"], None)
    _check_mapping(file, "overrides", content.get("overrides") or {}, PARTS)
    for part, overrides in (content.get("overrides") or {}).items():
        _check_mapping(file, f"overrides.{part}", overrides or {}, None)
    models = {str(key): str(name or key) for key, name in content["models"].items()}
    if sorted(content.get("slowest_first") or models) != sorted(models):
        raise AnalysisError(f"{file}: slowest_first must name each of the models once: {', '.join(models)}")
    _check_mapping(file, "variants", content.get("variants") or {}, models)
    seeds = content.get("seeds") or ()
    if not isinstance(seeds, list | tuple) or not all(isinstance(seed, int) for seed in seeds):
        raise AnalysisError(f"{file}: seeds={seeds!r} must be a list of numbers, such as [0, 1, 2]")
    given = {key: value for key, value in content.items() if value is not None}
    return StudyPlan(**given | {"models": models})


def _check_mapping(file: Path, what: str, value: Any, known: Collection[str] | None) -> None:
    if not isinstance(value, dict):
        raise AnalysisError(f"{file}: {what} must be a mapping of keys to values, not {value!r}")
    for key in value:
        if known is not None and key not in known:
            raise AnalysisError(f"{file}: {what} has an unknown key {key!r}; known are {', '.join(sorted(known))}")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
