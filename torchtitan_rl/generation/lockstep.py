"""How a decision reaches every rank of a replica.

Invariant: the ranks of one channel receive the same bytes in the same order. The gloo channel is in
`backends/vllm/gloo_lockstep.py`.
"""

from __future__ import annotations

import queue
import threading
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


class ThreadedChannel:
    """A channel between threads of one process; `make_threaded_channels` gives one end per rank."""

    def __init__(
        self, rank: int, mailboxes: list[queue.SimpleQueue[bytes]], meeting: threading.Barrier
    ) -> None:
        self._rank = rank
        self._mailboxes = mailboxes
        self._meeting = meeting

    @property
    def world_size(self) -> int:
        return len(self._mailboxes)

    def broadcast(self, data: bytes | None) -> bytes:
        if data is None:
            return self._mailboxes[self._rank].get()
        for mailbox in self._mailboxes[1:]:
            mailbox.put(data)
        return data

    def barrier(self) -> None:
        self._meeting.wait()


def make_threaded_channels(world_size: int) -> list[ThreadedChannel]:
    mailboxes: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(world_size)]
    meeting = threading.Barrier(world_size)
    return [ThreadedChannel(rank, mailboxes, meeting) for rank in range(world_size)]
