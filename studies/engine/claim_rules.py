"""The rules by which a study decides its claims: what is measured, and what its interval must be.

They are general; a study's YAML (study_plan.py) says which claims they decide. study_claims.py reads the numbers.
"""

from dataclasses import dataclass

SEEN, NOT_SEEN, UNDECIDED = "seen", "not seen", "not decidable at this size"
#: In the place of a verdict.
FEW_SEEDS, NOT_RUN = "none (too few seeds)", "not run"

#: A head is local or global by its memory length, as a share of the training length.
LOCAL, GLOBAL = 1 / 16, 1 / 2
#: Share of all heads that must be local, or global.
SOME_HEADS = 0.05


@dataclass(frozen=True)
class Rule:
    """
    Attributes:
        measure: what is measured, as a page says it.
        holds: sign of the measure where the claim holds, "+" or "-"; "0" where it holds near zero.
        needs: keys that a claim of this rule must have besides `claim`, `rule` and `models`.
        may: keys that it may have.
        unit: of the measure; "%" for shares.
    """

    measure: str
    holds: str
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    unit: str = "nats"

    @property
    def compares_losses(self) -> bool:
        """Whether it is of held-out losses at the end, of runs or variants."""
        return "of" in self.may


_CHANGE = "change of the loss when the context doubles at a position, from the octave before it to the octave after it"
_LOSS = "held-out loss at the end minus that of the other model"
RULES: dict[str, Rule] = {
    "falls": Rule(_CHANGE, "-", ("at",)),
    "rises": Rule(_CHANGE, "+", ("at",)),
    "falls_behind": Rule(f"{_CHANGE}, minus that of the other model on the same texts", "+", ("at", "than")),
    "lower": Rule(_LOSS, "-", ("than",), ("of",)),
    "higher": Rule(_LOSS, "+", ("than",), ("of",)),
    "same": Rule(_LOSS, "0", ("than", "within"), ("of",)),
    "same_unpruned": Rule(
        "held-out loss of the trained weights with pruning minus that without, on the same texts", "0", ("within",)
    ),
    "local_heads": Rule(
        f"share of heads whose memory is shorter than T / {1 / LOCAL:.0f} at the end, less {100 * SOME_HEADS:.0f} %",
        "+",
        unit="%",
    ),
    "global_heads": Rule(
        f"share of heads whose memory is at least T / {1 / GLOBAL:.0f} at the end, less {100 * SOME_HEADS:.0f} %",
        "+",
        unit="%",
    ),
    "more_global_heads": Rule(
        f"share of heads whose memory is at least T / {1 / GLOBAL:.0f}, last measurement less first",
        "+",
        unit="%",
    ),
    "prunes_more": Rule("share of tiles that pruning skips, last measurement less first", "+", unit="%"),
    "prunes_faster": Rule("tokens per second with pruning relative to those without, less 1", "+", unit="%"),
    "sooner": Rule(
        "training tokens to the other model's final held-out loss, relative to its budget, less 1",
        "-",
        ("than",),
        unit="%",
    ),
}


def meaning(name: str) -> str:
    """When a claim of the rule is seen, as a page says it."""
    rule = RULES[name]
    side = {"+": "above zero", "-": "below zero", "0": "within the stated margin around zero"}[rule.holds]
    return f"{rule.measure}; seen if the interval lies {side}"
