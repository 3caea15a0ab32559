"""Reads a sharded checkpoint without running code that it may contain.

torch.distributed.checkpoint unpickles its `.metadata` file and every entry that is not a tensor, and unpickling can
run any code. Here `.metadata` may hold only the classes that describe tensors, entries are tensors only (those the
library reads with `weights_only=True`), and shards lie in the checkpoint's own folder.
"""

import io
import pickle
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

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


class UnsafeCheckpointError(ValueError):
    """The checkpoint contains more than tensors and their description."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise UnsafeCheckpointError(f".metadata refers to {module}.{name}, which no checkpoint of tensors needs")

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeCheckpointError(".metadata refers to objects outside it")


def _memory_format(of: Any, name: Any) -> Any:
    """Replaces getattr: Python before 3.11.4 pickles a member of an enumeration as an attribute of its class."""
    if of is _MEM_FORMAT_ENCODING and name in _MEM_FORMAT_ENCODING.__members__:
        return _MEM_FORMAT_ENCODING[name]
    raise UnsafeCheckpointError(".metadata asks for an attribute, which no checkpoint of tensors needs")


class TensorReader(FileSystemReader):
    """`FileSystemReader` for checkpoints that may come from anywhere.

    Raises:
        UnsafeCheckpointError: from `read_metadata`; nothing of the checkpoint has been acted on then.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise UnsafeCheckpointError(f".metadata holds a {type(metadata).__name__}")
        for info in (metadata.storage_data or {}).values():
            name = info.relative_path
            if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
                raise UnsafeCheckpointError(f".metadata refers to the file {name!r}, outside its folder")
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
        raise UnsafeCheckpointError(f"{read_item.dest_index.fqn} is stored as pickled bytes and not as a tensor")


def read_tensors(folder: Any, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a sharded checkpoint, whole and on the CPU, on one process; all of them without `names`."""
    reader = TensorReader(folder)
    stored = reader.tensors()
    wanted = {name: stored[name] for name in (stored if names is None else names)}
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in wanted.items()}
    with warnings.catch_warnings():
        # torch warns about reading on one process, which is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.load(state, storage_reader=reader, planner=TensorPlanner(), no_dist=True)
    return state
