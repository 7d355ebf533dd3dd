"""Registers memory of this process with CUDA, so that copies between it and a device are direct.

A copy from or to other memory passes through a small buffer of the driver, which is slower.
Registering takes time too, so memory is registered once and reused for many versions. (None of this
was measured on a GPU.) Memory that CUDA refuses to register is used all the same.

Invariant: each registration is released exactly once: by `HostPins.unpin`, before the memory is
unmapped, or by `HostPins.close`.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torchtitan_rl.errors import WeightSyncError

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: for the contexts of all devices


class HostPins:
    """The registered memory of this process, which computes on the CUDA device ``device``; None:
    nothing is registered. All methods may be called from any thread."""

    def __init__(self, device: int | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._pinned: set[int] = set()  # addresses

    @property
    def are_used(self) -> bool:
        return self._device is not None

    def pin(self, memory: torch.Tensor) -> None:
        if self._device is None:
            return
        address, num_bytes = memory.data_ptr(), memory.nbytes
        with self._lock:
            if address in self._pinned:
                return
            error = self._call("cudaHostRegister", address, num_bytes, _PORTABLE)
            if error == 0:
                self._pinned.add(address)
                return
        logger.warning(
            "%d MiB of host memory cannot be pinned (CUDA error %d): weights are copied slowly",
            num_bytes >> 20,
            error,
        )

    def unpin(self, memory: torch.Tensor) -> None:
        """Release ``memory`` if it is registered. No copy from or to it may run. Raises
        WeightSyncError: CUDA does not release it."""
        self._release(memory.data_ptr())

    def close(self) -> None:
        """Release all memory; see `unpin`."""
        for address in list(self._pinned):
            self._release(address)

    def _release(self, address: int) -> None:
        with self._lock:
            if address not in self._pinned:
                return
            self._pinned.remove(address)
            error = self._call("cudaHostUnregister", address)
        if error:
            raise WeightSyncError(f"pinned memory cannot be released (CUDA error {error})")

    def _call(self, name: str, *arguments: int) -> int:
        """Call a function of CUDA's runtime, and return its error code: in a new thread, because a
        thread's device is 0 until another is set, and its next kernel would report the error once
        more."""

        def call() -> int:
            torch.cuda.set_device(self._device)
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            return int(getattr(runtime, name)(*arguments))

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call).result()
