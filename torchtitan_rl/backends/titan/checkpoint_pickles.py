"""Protection against checkpoints that execute code when they are loaded.

torch's distributed checkpoint stores its metadata, and values that are not tensors, as pickles,
which can call any function. Both are first read by an unpickler that accepts only a few names, so
that a checkpoint from an untrusted source that refers to others is refused.
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
    """Check that the metadata has only names, sizes and locations of tensors.

    Raises:
        CheckpointError: it has more, or cannot be read.
    """
    try:
        _MetadataReader(io.BytesIO((folder / _METADATA).read_bytes())).load()
    except Exception as error:  # arbitrary bytes can make an unpickler raise anything
        raise CheckpointError(
            f"checkpoint {folder}: {_METADATA} is refused: {type(error).__name__}: {error}"
        ) from error


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads values that are not tensors only if `torch.load` accepts them as plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one value that is not a tensor.

        Raises:
            pickle.UnpicklingError: it is not plain data.
        """
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _ALLOWED and not is_dtype:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)
