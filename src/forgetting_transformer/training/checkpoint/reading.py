"""Tensors of a checkpoint that any strategy wrote, read and held to the digests of what was saved."""

import pickle
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from forgetting_transformer.ops.finite import NotFiniteError, check_finite
from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError, checksum, reason_of, steps_in
from forgetting_transformer.training.checkpoint.safe_reader import TensorReader, UnsafeCheckpointError, read_tensors
from forgetting_transformer.training.faults.corruption import differing


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Fills a plain model on one process with the weights of a checkpoint that any strategy wrote."""
    own = model.state_dict()
    check_names(checkpoint, {f"model.{name}": tensor for name, tensor in own.items()})
    tensors = load_tensors(checkpoint, [f"model.{name}" for name in own])
    model.load_state_dict(part_of("model.", tensors))
    check_digests(checkpoint, [differing(digests_of(checkpoint), tensors)])
    check_weights(model, checkpoint.path)


def check_weights(model: nn.Module, where: Any) -> None:
    """Looks once at weights that are to be used; where they are from is for the message.

    Raises:
        CheckpointError: one is not finite.
    """
    try:
        check_finite(model.named_parameters(), where)
    except NotFiniteError as error:
        raise CheckpointError(str(error)) from error


def read_weights(checkpoint: Checkpoint, names: Iterable[str] | None = None, part: str = "model.") -> dict[str, Tensor]:
    """Weights of a checkpoint on the CPU, on one process, by the model's names; all of them without `names`.

    Args:
        part: prefix of their names in the checkpoint; "callbacks.ema." for what the callback ema keeps of them.

    Raises:
        CheckpointError: they are not there, cannot be read, or are not what was saved.
    """
    stored = stored_names(checkpoint)
    wanted = [name for name in stored if name.startswith(part)] if names is None else [f"{part}{n}" for n in names]
    if lacking := sorted({*wanted} - stored):
        raise CheckpointError(f"{checkpoint.path} belongs to another model: it has no {lacking[0].removeprefix(part)}")
    tensors = load_tensors(checkpoint, wanted)
    check_digests(checkpoint, [differing(digests_of(checkpoint), tensors)])
    return part_of(part, tensors)


def load_tensors(checkpoint: Checkpoint, names: list[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a checkpoint on the CPU, on one process; all of them without `names`.

    Raises:
        CheckpointError: naming the shard that cannot be read, if that is it.
    """
    try:
        return read_tensors(checkpoint.path / "state", names)
    except (CheckpointException, OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise unreadable(checkpoint, error) from error


def unreadable(checkpoint: Checkpoint, error: BaseException) -> CheckpointError:
    """Why tensors could not be read, with the shard where one is to blame."""
    if isinstance(error, CheckpointException):
        # A BaseException that maps ranks to (exception, traceback).
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, UnsafeCheckpointError):
        return CheckpointError(f"{checkpoint.path} was not loaded: {error}")
    for file in sorted((checkpoint.path / "state").glob("*")):
        try:
            checksum(file)
        except OSError as broken:
            return CheckpointError(
                f"{file} cannot be read: {broken.strerror}; bring back a copy, or take another checkpoint"
            )
    if isinstance(error, OSError):
        return CheckpointError(f"{error.filename or checkpoint.path} cannot be read: {error.strerror}")
    return CheckpointError(f"{checkpoint.path} does not fit this model: {reason_of(error)}")


def part_of(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def check_names(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> set[str]:
    """The names of all tensors in the checkpoint.

    Raises:
        CheckpointError: those of the model are not the names of this one.
    """
    stored = stored_names(checkpoint)
    wanted = {name for name in tensors if name.startswith("model.")}
    present = {name for name in stored if name.startswith("model.")}
    if wanted != present:
        raise CheckpointError(
            f"{checkpoint.path} belongs to another model: missing {sorted(wanted - present)[:3]}, "
            f"unexpected {sorted(present - wanted)[:3]}"
        )
    return stored


def stored_names(checkpoint: Checkpoint) -> set[str]:
    """The names of all tensors in the checkpoint.

    Raises:
        CheckpointError: its list of them cannot be read.
    """
    try:
        return set(TensorReader(checkpoint.path / "state").tensors())
    except (UnsafeCheckpointError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{checkpoint.path} was not loaded: {error}") from error


def digests_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Digests of what was to be saved, by tensor."""
    return checkpoint.trainer_state()["digests"]


def check_digests(checkpoint: Checkpoint, wrong: list[list[str]]) -> None:
    """
    Args:
        wrong: for each rank the tensors that are not, now that they are loaded, what was to be saved.

    Raises:
        CheckpointError: there are such tensors.
    """
    ranks = [rank for rank, names in enumerate(wrong) if names]
    if not ranks:
        return
    names = wrong[ranks[0]]
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    where = "" if len(wrong) == 1 or len(ranks) == len(wrong) else f" on rank {', '.join(map(str, ranks))}"
    older = [step for step in steps_in(checkpoint.path.parent) if step < checkpoint.step]
    back = f"the last good checkpoint before it is at {older[-1]:,} tokens" if older else "there is no older checkpoint"
    raise CheckpointError(
        f"{checkpoint.path}: {names[0]}{more}{where} is not what training held after {checkpoint.step:,} tokens, "
        "though the files are as they were written: memory or a GPU failed, at the save or now. Start again on "
        "another machine; if it stays so, move this checkpoint away and the same command goes "
        f"on from the one before ({back})"
    )
