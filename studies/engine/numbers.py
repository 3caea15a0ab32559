"""The numbers that sentences on a study's page have; studies/*/page.py chooses and rounds them.

Losses are in nats per token. A model is above another one by its loss minus that of the other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from forgetting_transformer.analysis.statistics import Estimate
from studies.engine.claims import findings
from studies.engine.results import losses_by_seed, read_study, split_seed

#: Words of the paper's needle, and of an answer that has found it.
NEEDLE, FOUND = 12, 10


class Answer(NamedTuple):
    """To a needle in a haystack: tokens of the prompt, words of the needle, whether it is the needle word for word."""

    length: int
    words: int
    exact: bool

    @property
    def found(self) -> bool:
        return self.words >= FOUND


@dataclass(frozen=True)
class StudyNumbers:
    """What the sentences of one study are made of.

    Args:
        study: content of study.json.
        place: the folder that holds it, for messages.
    """

    study: Mapping[str, Any]
    place: Path

    @classmethod
    def read(cls, folder: Path, **required: Sequence[str]) -> "StudyNumbers":
        """
        Args:
            required: models= and variants= that the sentences are about.

        Raises:
            LookupError: one of these lacks the held-out loss of a seed.
        """
        study = read_study(folder)
        if missing := [
            name
            for kind, names in required.items()
            for name in names
            if None in study[kind].get(name, {}).get("heldout_loss", [None])
        ]:
            raise LookupError(
                f"{folder / 'study.json'} lacks held-out losses of {', '.join(missing)}: finish the study first"
            )
        return cls(study, folder)

    def measured(self, beginning: str, model: str) -> Estimate:
        """What was measured for a model and the claim that begins so.

        Raises:
            LookupError: there is no such claim, or nothing was measured.
        """
        for claim in self.study["claims"]:
            if claim["claim"].startswith(beginning) and model in claim["models"]:
                (found,) = [one for one in findings(self.study, claim) if one.model == model]
                if found.measured is not None:
                    return found.measured
        raise LookupError(f"{self.place} has no measurement of {model} for a claim that begins with {beginning!r}")

    def claimed(self, beginning: str, model: str) -> str:
        """`measured` with its interval, as in "+0.123 ± 0.045"."""
        return self.measured(beginning, model).text("+")

    def apart(self, model: str, other: str, kind: str = "models") -> list[float]:
        """How far a model ends above another one, by seed; `kind` "variants" if it is a variant."""
        own, others = losses_by_seed(self.study[kind][model]), losses_by_seed(self.study["models"][other])
        return [own[seed] - others[seed] for seed in sorted(own)]

    def over_training(self, model: str) -> dict[int, float]:
        """Training tokens -> held-out loss, mean of the seeds."""
        curves = [dict(curve) for curve in self.study["models"][model]["heldout_curve"]]
        return {tokens: mean(curve[tokens] for curve in curves) for tokens in curves[0]}

    def beyond(self, model: str) -> float:
        """Change of the loss from the octave before the training length to the second one after it, first seed."""
        slopes = self.study["models"][model]["per_token_loss"]["slope"]
        return slopes[-1]["after"] - slopes[-3]["after"]

    def of_heads(self, model: str, which: int, key: str) -> float:
        """Mean over seeds of what was measured of heads; `which` 0 is the first measurement, -1 the last."""
        return mean(of_seed[which][key] for of_seed in self.study["models"][model]["heads"])

    def answers(self, model: str, mode: str, beyond: bool) -> list[Answer]:
        """To the paper's needle, of all seeds; up to the training length, or beyond it.

        Args:
            mode: "standard" or "easy".

        Raises:
            LookupError: the model was not asked in this mode.
        """
        return [answer for of_seed in self.answers_by_seed(model, mode, beyond) for answer in of_seed]

    def answers_by_seed(self, model: str, mode: str, beyond: bool) -> list[list[Answer]]:
        """`answers` of each seed that was asked, in their order."""
        found, runs = [], self.study.get("needles", {}).get(model, {})
        for run in sorted(runs, key=lambda run: split_seed(run)[1]):
            if (of_mode := runs[run].get(mode)) is None:
                continue
            limit = of_mode["train_length"] or math.inf
            found.append(
                [
                    Answer(length, round(NEEDLE * share), whole == 1)
                    for words, exact in zip(of_mode["words"], of_mode["exact"], strict=True)
                    for length, share, whole in zip(of_mode["lengths"], words, exact, strict=True)
                    if share is not None and (length > limit) == beyond
                ]
            )
        if not any(found):
            raise LookupError(f"{self.place} has no answers of {model} to the needle in the {mode} mode")
        return found


def in_words(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """As in "1.234, 2.345 and 3.456"; `sign` "+" shows plus signs."""
    *first, last = [f"{value:{sign}.{digits}f}" for value in values]
    return f"{', '.join(first)} and {last}" if first else last
