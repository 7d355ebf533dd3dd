"""Moves the trainer's state between device and host memory without creating new tensors.

The storages of the tensors are emptied and refilled. Parameters, optimizer states, FSDP's shards
and their views stay the same objects, so no other code needs to know.

Invariants: `onload` restores every byte that `offload` took; calling either again has no effect;
between the two the tensors have no memory and must not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor


class DeviceMemory:
    """``tensors`` returns all current tensors; several may share a storage."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._offloaded: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._buffers: dict[int, torch.Tensor] = {}  # host memory by storage, kept for reuse

    def offload(self) -> None:
        """Copy all storages to the host and free them."""
        if self._offloaded:
            return
        storages = _storages(self._tensors())
        buffers = {key: self._buffer(key, storage) for key, storage in storages.items()}
        for key, storage in storages.items():
            buffers[key].copy_(_bytes(storage), non_blocking=True)
        _synchronize()
        for key, storage in storages.items():
            self._offloaded.append((storage, buffers[key]))
            storage.resize_(0)
        self._buffers = buffers
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()  # for other processes on the device

    def onload(self) -> None:
        """Allocate the storages again and copy everything back."""
        for storage, buffer in self._offloaded:
            storage.resize_(buffer.numel())
            _bytes(storage).copy_(buffer, non_blocking=True)
        _synchronize()
        self._offloaded.clear()

    def require(self) -> None:
        """Raise RuntimeError between `offload` and `onload`, when reading a tensor would crash."""
        if self._offloaded:
            raise RuntimeError("the trainer's state is offloaded; call onload first")

    def _buffer(self, key: int, storage: torch.UntypedStorage) -> torch.Tensor:
        held = self._buffers.get(key)
        if held is not None and held.numel() == storage.nbytes():
            return held
        is_pinned = storage.device.type == "cuda"
        return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage once, by an identity that does not depend on its memory."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            found[storage._cdata] = storage
    return found


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
