"""Types of keys: types of Python with what pydantic holds a value to."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from forgetting_transformer.metric_names import VAL_EMA, VAL_SET
from forgetting_transformer.ranges import COUNT, SIZE, TOKENS
from forgetting_transformer.training.records.run_directory import KINDS


def _switch(word: str) -> BeforeValidator:
    """Refuses 1 and 0 beside true, false and a word, which pydantic takes for true and false."""

    def check(value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            raise PydanticCustomError("literal_error", "", {"expected": f"'{word}', true or false"})
        return value

    return BeforeValidator(check)


#: True, false, or what is best here.
Switch = Annotated[Literal["auto", True, False], _switch("auto")]
#: True, false, or only what takes little time.
Check = Annotated[Literal["check", True, False], _switch("check")]
#: Tokens of a run, a budget or an interval. Whole numbers may be written as 1e9.
Tokens = Annotated[int, Field(ge=1, le=TOKENS.high)]
#: The same, or none.
TokensOrZero = Annotated[int, Field(ge=0, le=TOKENS.high)]
#: Things of which there may be many: sequences in a batch, ids of a vocabulary, seconds.
Count = Annotated[int, Field(ge=1, le=COUNT.high)]
#: Widths and numbers of parts of a model.
Size = Annotated[int, Field(ge=1, le=SIZE.high)]
Workers = Annotated[int, Field(ge=0, le=1024)]
TokenId = Annotated[int, Field(ge=0, le=COUNT.high)]
#: Ratios, scales and small constants that make no sense at zero.
Positive = Annotated[float, Field(gt=0, le=1e9)]
#: Zero is allowed: it trains nothing, which is a way to measure speed and to look at the data.
LearningRate = Annotated[float, Field(ge=0, le=1000)]


#: Text that is not empty, as a variable of the shell that is not set leaves it. To pathlib that is the current folder.
Text = Annotated[str, Field(pattern=r"\S")]


def _check_devices(value: Any) -> Any:
    listed = isinstance(value, list) and all(type(n) is int and 0 <= n < _DEVICES for n in value)
    gpus = value == -1 or (listed and 0 < len(value) == len({*value}))
    counted = type(value) is int and 1 <= value <= _DEVICES
    if not (value == "auto" or gpus or counted):
        raise ValueError(
            f"fabric.devices={value} must be a number of processes from 1 to {_DEVICES:,}, 'auto', GPUs as in "
            "[0, 1], or -1 for all of them"
        )
    return value


_DEVICES = 1024
#: Processes of a node: their number, "auto", a list of GPUs, or -1 for all of them.
Devices = Annotated[Any, BeforeValidator(_check_devices)]


def _check_steps(steps: list[int]) -> list[int]:
    if not (len(steps) == 2 and 1 <= steps[0] <= steps[1] < steps[0] + _TRACED_STEPS):
        raise ValueError(
            f"train.profile_steps={steps} must be [first, last] with 1 <= first <= last, at most {_TRACED_STEPS} "
            "steps, as in train.profile_steps=[10,12]"
        )
    return steps


#: Each of a large model has tens of thousands of events.
_TRACED_STEPS = 100
#: The first and the last step of a trace.
TracedSteps = Annotated[list[int], AfterValidator(_check_steps)]


def _check_set_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", name):
        raise ValueError(
            f"eval_sets: the name {name!r} must be of letters, digits, _ and -, at most 40, and begin with a letter or "
            "a digit: files are called by it"
        )
    if f"{VAL_SET}{name}" in (*KINDS, VAL_EMA):
        raise ValueError(f"eval_sets: the name {name!r} is that of a file of runs; choose another name")
    return name


#: Name of one of `eval_sets`.
SetName = Annotated[str, AfterValidator(_check_set_name)]
