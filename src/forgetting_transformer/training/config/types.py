"""Types of keys: Python types with the ranges that pydantic checks."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from forgetting_transformer.ranges import COUNT, SIZE, TOKENS


def _check_switch(value: Any) -> Any:
    """Refuses 1 and 0, which pydantic takes for true and false."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise PydanticCustomError("literal_error", "", {"expected": "'auto', true or false"})
    return value


#: True, false, or the best choice for the run.
Switch = Annotated[Literal["auto", True, False], BeforeValidator(_check_switch)]
#: Tokens of a run, a budget or an interval. Whole numbers may be written as 1e9.
Tokens = Annotated[int, Field(ge=1, le=TOKENS.high)]
#: Tokens, or 0 for none.
TokensOrZero = Annotated[int, Field(ge=0, le=TOKENS.high)]
#: Large counts: sequences in a batch, ids of a vocabulary, seconds.
Count = Annotated[int, Field(ge=1, le=COUNT.high)]
#: Widths and numbers of parts of a model.
Size = Annotated[int, Field(ge=1, le=SIZE.high)]
Workers = Annotated[int, Field(ge=0, le=1024)]
TokenId = Annotated[int, Field(ge=0, le=COUNT.high)]
#: Ratios, scales and small constants that make no sense at zero.
Positive = Annotated[float, Field(gt=0, le=1e9)]
#: Zero is allowed: it trains nothing, which is a way to measure speed and to look at the data.
LearningRate = Annotated[float, Field(ge=0, le=1000)]


#: Text that is not empty. A variable of the shell that is not set leaves it empty, which pathlib takes for the current
#: folder.
Text = Annotated[str, Field(pattern=r"\S")]


def _check_devices(value: Any) -> Any:
    if not (value == "auto" or (type(value) is int and 1 <= value <= 1024)):
        raise ValueError(
            f"fabric.devices={value} must be a number of processes from 1 to 1,024, or 'auto' for all GPUs; "
            "CUDA_VISIBLE_DEVICES chooses among them"
        )
    return value


#: Processes of a node: their number, or "auto".
Devices = Annotated[Workers | Literal["auto"], BeforeValidator(_check_devices)]
