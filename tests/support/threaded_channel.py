"""A lockstep channel between threads of one process."""

from __future__ import annotations

import queue
import threading


class ThreadedChannel:
    """A channel between threads of one process; `make_threaded_channels` gives one end per rank."""

    def __init__(
        self, rank: int, mailboxes: list[queue.SimpleQueue[bytes]], meeting: threading.Barrier
    ) -> None:
        self._rank = rank
        self._mailboxes = mailboxes
        self._meeting = meeting

    def broadcast(self, data: bytes | None) -> bytes:
        if data is None:
            return self._mailboxes[self._rank].get()
        for mailbox in self._mailboxes[1:]:
            mailbox.put(data)
        return data

    def barrier(self) -> None:
        self._meeting.wait()

    def break_up(self) -> None:
        """Make all barriers fail, as the death of a rank does."""
        self._meeting.abort()


def make_threaded_channels(world_size: int) -> list[ThreadedChannel]:
    mailboxes: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(world_size)]
    meeting = threading.Barrier(world_size)
    return [ThreadedChannel(rank, mailboxes, meeting) for rank in range(world_size)]
