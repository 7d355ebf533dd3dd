"""What a checkpoint may do to the process that loads it: be read, and nothing else.

torch's distributed checkpoint keeps its metadata as a pickle, and loads values that are no tensors
by `pickle` as well; a pickle can call any function. Both are read first by readers that know a few
names only, so that a checkpoint from elsewhere that asks for others is refused.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_rl.errors import CheckpointError

_METADATA = ".metadata"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "BytesStorageMetadata"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
}


def check_metadata(folder: Path) -> None:
    """Refuse metadata that is more than names, sizes and places of tensors.

    Raises:
        CheckpointError: it is, or it is no metadata at all.
    """
    try:
        _MetadataReader(io.BytesIO((folder / _METADATA).read_bytes())).load()
    except Exception as error:  # whatever bytes make of a reader of pickles
        raise CheckpointError(
            f"checkpoint {folder}: {_METADATA} is refused: {type(error).__name__}: {error}"
        ) from error


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads values that are no tensors only where `torch.load` takes them for plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """
        Raises:
            pickle.UnpicklingError: the value is something else.
        """
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _ALLOWED and not is_dtype:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
