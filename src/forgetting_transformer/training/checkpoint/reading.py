"""Reads a checkpoint of any strategy: into a run, on all ranks, or whole on the CPU of one process.

What a stranger put into it is not run. torch.distributed.checkpoint unpickles its `.metadata` file and every entry that
is not a tensor, and unpickling can run any code. Here `.metadata` may hold only the classes that describe tensors,
entries are tensors only (those the library reads with `weights_only=True`), and shards lie in the checkpoint's own
folder.
"""

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from forgetting_transformer.ops.finite import NotFiniteError, check_finite
from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError, reason_of
from forgetting_transformer.training.checkpoint.writing import tensors_of


def load_training(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None,
) -> None:
    """Fills model and optimizer, on all ranks. Learning rate, decay and betas stay as the config set them.

    Args:
        group: gloo group of all ranks; None for one.

    Raises:
        CheckpointError: its tensors are not those of this model, or cannot be read.
    """
    settings = [{k: v for k, v in param_group.items() if k != "params"} for param_group in optimizer.param_groups]
    tensors, optimizer_state = tensors_of(model, optimizer)
    stored = _check_names(checkpoint, tensors)
    if lacking := sorted(tensors.keys() - stored):
        raise CheckpointError(
            f"{checkpoint.path} was written with another optimizer: it has no {lacking[0]}; to begin with its weights "
            "alone, export it and give init_from"
        )
    reader = TensorReader(checkpoint.path / "state")
    with _named(checkpoint):
        dcp.load(tensors, storage_reader=reader, planner=TensorPlanner(), process_group=group, no_dist=group is None)
    set_model_state_dict(model, _part_of("model.", tensors))
    for name, tensor in _part_of("optimizer.", tensors).items():
        before = optimizer_state[name]
        optimizer_state[name] = tensor if isinstance(before, Tensor) else type(before)(tensor.item())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    for param_group, setting in zip(optimizer.param_groups, settings, strict=True):
        param_group.update(setting)


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Fills a plain model on one process."""
    names = [f"model.{name}" for name in model.state_dict()]
    _check_names(checkpoint, names)
    model.load_state_dict(_part_of("model.", load_tensors(checkpoint, names)))
    check_weights(model, checkpoint.path)


def check_weights(model: nn.Module, where: Any) -> None:
    """Checks once that weights are finite; their origin is for the message.

    Raises:
        CheckpointError: one is not finite.
    """
    try:
        check_finite(model.named_parameters(), where)
    except NotFiniteError as error:
        raise CheckpointError(str(error)) from error


def load_tensors(checkpoint: Checkpoint, names: list[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a checkpoint, whole and on the CPU, on one process; all of them without `names`.

    Raises:
        CheckpointError: they cannot be read.
    """
    with _named(checkpoint), warnings.catch_warnings():
        # torch warns about reading on one process, which is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        reader = TensorReader(checkpoint.path / "state")
        stored = reader.tensors()
        wanted = {name: stored[name] for name in (stored if names is None else names)}
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in wanted.items()}
        dcp.load(state, storage_reader=reader, planner=TensorPlanner(), no_dist=True)
    return state


@contextlib.contextmanager
def _named(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns errors of reading a checkpoint into CheckpointErrors that name it."""
    try:
        yield
    except (CheckpointException, OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{checkpoint.path} was not loaded: {reason_of(error)}; bring back a copy, or take another checkpoint"
        ) from error


def _part_of(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_names(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """The names of all tensors in the checkpoint.

    Raises:
        CheckpointError: its weights are not the `model.*` among `names`.
    """
    with _named(checkpoint):
        stored = set(TensorReader(checkpoint.path / "state").tensors())
    wanted, present = ({name for name in of if name.startswith("model.")} for of in (names, stored))
    if wanted != present:
        raise CheckpointError(
            f"{checkpoint.path} belongs to another model: missing {sorted(wanted - present)[:3]}, "
            f"unexpected {sorted(present - wanted)[:3]}"
        )
    return stored


#: All that the metadata of a checkpoint of tensors consists of.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, which no checkpoint of tensors needs")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(".metadata refers to objects outside it")


def _memory_format(of: Any, name: Any) -> Any:
    """Replaces getattr: Python before 3.11.4 pickles a member of an enumeration as an attribute of its class."""
    if of is _MEM_FORMAT_ENCODING and name in _MEM_FORMAT_ENCODING.__members__:
        return _MEM_FORMAT_ENCODING[name]
    raise pickle.UnpicklingError(".metadata asks for an attribute, which no checkpoint of tensors needs")


class TensorReader(FileSystemReader):
    """`FileSystemReader` for checkpoints that may come from anywhere.

    Raises:
        pickle.UnpicklingError: from `read_metadata`; nothing of the checkpoint has been acted on then.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f".metadata holds a {type(metadata).__name__}")
        for info in (metadata.storage_data or {}).values():
            name = info.relative_path
            if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
                raise pickle.UnpicklingError(f".metadata refers to the file {name!r}, outside its folder")
        storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage_meta.load_id = self.load_id
        metadata.storage_meta = storage_meta
        return metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Every tensor by name. What is not a tensor is left alone."""
        entries = self.read_metadata().state_dict_metadata
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


class TensorPlanner(DefaultLoadPlanner):
    """Refuses to unpickle an entry that pretends to be bytes where a tensor is wanted."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is stored as pickled bytes and not as a tensor")
