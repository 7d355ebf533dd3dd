"""The report of a failure: what was lost, how that was seen, and how long each part of its repair
took. And the pauses between starts that fail.

A `Failure` is created when a loss is seen. It then gets `restarted` (each time that new processes
have started) and ends with `serving` or `given_up`. Only a report that has ended is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from torchtitan_rl.errors import (
    DeadlineError,
    HostLeftError,
    HostLostError,
    LoopStalledError,
    ProcessEndedError,
    ProcessStoppedError,
)

_FIRST_DELAY_S, _MAX_DELAY_S = 5.0, 320.0


def restart_delay_s(num_failed: int) -> float:
    """Return the seconds from the ``num_failed``-th start in a row that failed to the next one:
    they double."""
    return min(_FIRST_DELAY_S * 2.0 ** (num_failed - 1), _MAX_DELAY_S)


class Part(StrEnum):
    """The kind of what was lost."""

    REPLICA = "replica"
    TRAINER = "trainer"
    ENDPOINT = "endpoint"
    HOST = "host"


class Sign(StrEnum):
    """How a loss was seen."""

    ENDED = "process ended"
    STOPPED = "process stopped"  # by SIGSTOP: the kernel does not run it
    SILENT = "no answer"
    STALLED = "no progress"
    HOST = "host lost"
    ANNOUNCED = "announced"  # its machine was told to end, so nothing of it was lost
    ERROR = "error"


_SIGNS = (
    (ProcessEndedError, Sign.ENDED),
    (ProcessStoppedError, Sign.STOPPED),
    (LoopStalledError, Sign.STALLED),
    (HostLeftError, Sign.ANNOUNCED),
    (HostLostError, Sign.HOST),
    ((DeadlineError, TimeoutError), Sign.SILENT),
)


def sign_of(error: BaseException) -> Sign:
    """Return how a loss was seen, from its error or, if that says nothing, from its causes."""
    causes = _causes(error)
    known = (sign for one in causes for kind, sign in _SIGNS if isinstance(one, kind))
    return next(known, Sign.ERROR)


def _silent_s(error: BaseException) -> float | None:
    known = (getattr(cause, "silent_s", None) for cause in _causes(error))
    return next((seconds for seconds in known if seconds is not None), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One loss. Times are those of one monotonic clock, in seconds.

    ``silent_s``: from the last sign of life until the loss was seen, if known. ``restart_s`` and
    ``serve_s``: from then until new processes had started, and until they served again.
    ``tokens_again`` and ``steps_again``: sampled tokens and optimizer steps that were lost and are
    taken again; the tokens are those known to be lost. ``requests_again``: requests that clients
    sent again. ``detail``: how it was shown that the new part equals the old one. ``given_up``: why
    nothing takes its place.
    """

    part: Part
    name: str
    sign: Sign
    cause: str
    seen_s: float
    silent_s: float | None = None
    restart_s: float | None = None
    serve_s: float | None = None
    successor: str = ""
    tokens_again: int = 0
    steps_again: int = 0
    requests_again: int = 0
    detail: str = ""
    given_up: str = ""

    @classmethod
    def of(cls, part: Part, name: str, error: BaseException, *, now_s: float) -> Failure:
        """Begin the report of a loss that ``error`` shows."""
        return cls(
            part=part,
            name=name,
            sign=sign_of(error),
            cause=" ".join(f"{error}".split()) or type(error).__name__,
            seen_s=now_s,
            silent_s=_silent_s(error),
        )

    def restarted(self, successor: str, *, now_s: float) -> Failure:
        """New processes have started, and get weights next."""
        return replace(self, successor=successor, restart_s=now_s - self.seen_s)

    def serving(self, *, now_s: float, steps_again: int = 0, detail: str = "") -> Failure:
        """The part serves again, which ends the report."""
        serve_s = now_s - self.seen_s
        return replace(self, serve_s=serve_s, steps_again=steps_again, detail=detail)

    def ended(self, why: str) -> Failure:
        """The part is given up, which ends the report."""
        return replace(self, given_up=why, successor="")

    def describe(self) -> str:
        """Describe an ended report in one line."""
        parts = [f"seen as {self.sign}"]
        if self.silent_s is not None:
            parts[0] += f" {self.silent_s:.2f} s after the last sign of life"
        if self.restart_s is not None:
            parts.append(f"restarted after {self.restart_s:.1f} s")
        if self.serve_s is not None:
            parts.append(f"serving again after {self.serve_s:.1f} s")
        if self.given_up:
            parts.append(f"given up: {self.given_up}")
        again = {
            "tokens sampled": self.tokens_again,
            "steps taken": self.steps_again,
            "requests sent": self.requests_again,
        }
        parts += [f"{number} {what} again" for what, number in again.items() if number]
        if self.detail:
            parts.append(self.detail)
        name = self.name if self.name.startswith(self.part) else f"{self.part} {self.name}"
        kind = "departure" if self.sign is Sign.ANNOUNCED else "failure"
        return f"{kind} of {name}: {', '.join(parts)}"
