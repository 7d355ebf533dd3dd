"""The commands of an engine loop: one dataclass for each.

The router sends a command unchanged to the loop that executes it (`EngineLoop.execute`), and the
loop sends an answer back. If all ranks must apply a command at the same point, it also becomes a
`LoopDecision`: `Inbox.ask` queues the command, and `decide` determines its place in the order.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torchtitan_rl.errors import GenerationError
from torchtitan_rl.types import EngineReading, EngineStats, PullReport

T_co = TypeVar("T_co", covariant=True)

PauseMode = Literal["keep", "abort", "wait"]
"""How a pause treats running requests: ``keep`` freezes them with their KV cache, ``abort`` ends
them with their tokens so far, ``wait`` lets them finish first. New requests queue in each mode."""


class EngineCommand(Generic[T_co]):
    """Base class of commands. ``T_co`` is the type of the answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AbortRequests(EngineCommand[None]):
    """End these requests with their tokens so far. The answer comes before the requests end.
    Unknown and ended ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pause(EngineCommand[None]):
    """Stop stepping. The answer comes once all ranks are between two steps.

    New requests queue until `Resume`; pulls and aborts continue. If an earlier pause still waits,
    the mode of the later pause applies to both. If a `Resume` comes before a pause is answered, the
    pause fails with a `GenerationError`.
    """

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Resume(EngineCommand[None]):
    """End a pause. Has no effect if there is none."""


@dataclass(frozen=True, slots=True)
class Sleep(EngineCommand[None]):
    """Pause with mode ``abort``, then release the device memory of all ranks, then answer.

    No step runs before a `WakeUp` and a later `Pull`, even after a `Resume`. A pull that is
    requested during the sleep waits for the wake-up.
    """


@dataclass(frozen=True, slots=True)
class WakeUp(EngineCommand[None]):
    """Allocate the memory again on all ranks. The loop stays paused, without weights."""


@dataclass(frozen=True, slots=True)
class Pull(EngineCommand[PullReport]):
    """Swap in the staged weights of ``version`` between two steps. If an earlier pull still waits,
    only this one is executed, and its report answers both."""

    version: int


@dataclass(frozen=True, slots=True)
class ReadTokens(EngineCommand[EngineReading]):
    """Report the progress of every running request now, and count the engine's tokens, between two
    steps.

    When the answer arrives, the callers of all requests have the tokens, logprobs and versions of
    that moment, and requests that ended earlier have returned to their callers.
    """


@dataclass(frozen=True, slots=True)
class ReadStats(EngineCommand[EngineStats]):
    """Return statistics that are at most a few steps old. Requests still in the inbox count as
    waiting."""


_Error = TypeVar("_Error", bound=GenerationError)


def uncancellable_future() -> Future[Any]:
    """Return a future whose ``cancel`` has no effect, so that the loop can always resolve it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def done_future(result: Any) -> Future[Any]:
    future = uncancellable_future()
    future.set_result(result)
    return future


def failed_future(error: GenerationError) -> Future[Any]:
    future = uncancellable_future()
    fail_future(future, error)
    return future


def fail_future(future: Future[Any], error: GenerationError) -> None:
    """Fail ``future`` with a copy of ``error``."""
    future.set_exception(copy_of(error))


def copy_of(error: _Error) -> _Error:
    """Copy an error, because one exception raised in several places would mix their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    vars(copy).update(vars(error))  # such as `ReplicaError.silent_s`
    return copy
