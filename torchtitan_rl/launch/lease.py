"""Who may write into a run's folder, where hosts share it: the rules, without clocks and files.

Each owner adds an *entry* with the next number; the one with the highest number owns the folder.
Only one contender can add a number. An owner changes its entry every ``beat_s`` and looks for
higher numbers; it acts until ``valid_s`` after it began its last look. A contender adds the next
number once it has seen the newest entry unchanged for ``silence_s``, then waits for ``settle_s``
before it acts.

Invariant: once an owner acts, none with a lower number does. The last look of an earlier owner
began before the entry was added, so its time is up when the contender has waited. Each host
measures durations by its own clock, and no two clocks are compared; ``settle_s`` is longer than
``valid_s`` for clocks that run at different speeds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """The same on all hosts."""

    beat_s: float = 3.0
    valid_s: float = 12.0
    silence_s: float = 15.0
    settle_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """``content`` changes with each beat. ``place`` is the running system and the file system that
    its owner used: `Contender` can tell that an owner there is dead."""

    number: int
    content: bytes
    token: str = ""
    place: str = ""
    process: str = "another process"
    is_released: bool = False


@dataclass(frozen=True, slots=True)
class Take:
    """Try to add entry ``number``. Whoever succeeds waits for ``settle_s``, looks once more, and
    owns the folder."""

    number: int
    settle_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again soon. ``process`` may own the folder."""

    process: str


@dataclass(frozen=True, slots=True)
class Refused:
    """``process`` owns the folder."""

    process: str


class Contender:
    """Decides what to do for what it sees.

    Args:
        dead_place: entries of this place are of dead owners, because the lock of the kernel there,
            which ends with its process, is ours. Empty where there is no such lock.
    """

    def __init__(self, times: LeaseTimes, *, dead_place: str = "") -> None:
        self._times = times
        self._dead_place = dead_place
        self._seen: Entry | None = None
        self._since_s = 0.0

    def see(self, newest: Entry | None, now_s: float) -> Take | Wait | Refused:
        if newest is None:
            return Take(1, 0.0)
        if newest.is_released or (self._dead_place and newest.place == self._dead_place):
            return Take(newest.number + 1, 0.0)
        if self._seen is None:
            self._seen, self._since_s = newest, now_s
        if newest != self._seen:
            return Refused(newest.process)
        if now_s - self._since_s >= self._times.silence_s:
            return Take(newest.number + 1, self._times.settle_s)
        return Wait(newest.process)


class Ownership:
    """What the owner of entry ``number`` may do. ``is_lost`` is final."""

    def __init__(self, number: int, token: str, times: LeaseTimes) -> None:
        self.number = number
        self.is_lost = False
        self.successor = ""  # who has taken over, once it is lost; empty: the entry was removed
        self._token = token
        self._valid_s = times.valid_s
        self._valid_until_s = float("-inf")

    def looked(self, newest: Entry | None, *, began_s: float) -> None:
        """``newest`` was read after ``began_s``."""
        if newest is None or (newest.number, newest.token) != (self.number, self._token):
            self.is_lost = True
            was_removed = newest is None or newest.number < self.number
            self.successor = "" if was_removed or newest is None else newest.process
        else:
            self._valid_until_s = began_s + self._valid_s

    def may_act(self, now_s: float) -> bool:
        """If not, and it is not lost: look first."""
        return not self.is_lost and now_s < self._valid_until_s
