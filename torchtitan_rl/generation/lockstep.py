"""How a decision reaches every rank of a replica.

Invariant: the ranks of one channel receive the same bytes in the same order. The gloo channel is in
`backends/vllm/gloo_lockstep.py`.
"""

from __future__ import annotations

from typing import Protocol


class LockstepChannel(Protocol):
    """One rank's end of the broadcast from rank 0."""

    @property
    def world_size(self) -> int: ...

    def broadcast(self, data: bytes | None) -> bytes:
        """Send ``data`` (rank 0) or wait for it (others, who pass None); returns it on all ranks.

        Raises:
            Exception: a peer is gone or the wait timed out; the ranks are no longer in step.
        """
        ...

    def barrier(self) -> None:
        """Return once all ranks are here, each having applied the same decisions before.

        Raises:
            Exception: as `broadcast`.
        """
        ...


class SoloChannel:
    """The channel of a replica with one rank: nothing is sent."""

    world_size = 1

    def broadcast(self, data: bytes | None) -> bytes:
        if data is None:
            raise ValueError("the only rank of a replica decides: give it data")
        return data

    def barrier(self) -> None:
        pass
