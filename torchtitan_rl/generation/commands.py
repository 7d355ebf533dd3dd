"""The commands of an engine loop: one dataclass for each.

A command travels as it is from the router to the loop that executes it (`EngineLoop.execute`), and
its answer travels back. To add one, define it here, issue it in the router and execute it in the
loop; the transport in between carries every command alike. If all ranks must apply it at the same
point, it also becomes a `LoopDecision`: `Inbox.ask` queues it and `decide` orders it.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torchtitan_rl.errors import GenerationError
from torchtitan_rl.types import EngineReading, EngineStats, PullReport

T_co = TypeVar("T_co", covariant=True)

PauseMode = Literal["keep", "abort", "wait"]
"""The treatment of running requests by a pause: they freeze with their KV, end with the tokens they
have, or finish first. New ones queue in each case."""


class EngineCommand(Generic[T_co]):
    """A command whose answer has the type ``T_co``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AbortRequests(EngineCommand[None]):
    """End these requests with the tokens they have; answered before they end. Unknown and ended ids
    are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pause(EngineCommand[None]):
    """Stop stepping; answered once all ranks are between two steps.

    Running requests freeze with their KV (``keep``), end with the tokens they have (``abort``)
    or finish first (``wait``); new ones queue, in each case, until `Resume`. Pulls and aborts
    continue. If another pause still waits, the later mode holds for both. A pause that a `Resume`
    ends before it is answered fails with a `GenerationError`.
    """

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Resume(EngineCommand[None]):
    """End a pause; no effect without one."""


@dataclass(frozen=True, slots=True)
class Sleep(EngineCommand[None]):
    """Pause by abort, then release the device memory of all ranks; answered when that is done.

    No step follows before `WakeUp` and then a `Pull` of new weights, even after a `Resume`. A
    pull that is requested while the engine sleeps waits for the wake-up.
    """


@dataclass(frozen=True, slots=True)
class WakeUp(EngineCommand[None]):
    """Allocate the memory again on all ranks. The loop stays paused, without weights."""


@dataclass(frozen=True, slots=True)
class Pull(EngineCommand[PullReport]):
    """Swap in the staged weights of ``version`` between two steps.

    If another pull still waits, the later one wins, and the report of its version answers both.
    """

    version: int


@dataclass(frozen=True, slots=True)
class ReadTokens(EngineCommand[EngineReading]):
    """Report the progress of every running request now, and count the engine's tokens.

    Both are read between two steps, which go on afterwards. When the answer arrives, callers know
    all tokens, logprobs and versions of that moment, and requests that ended before it have ended
    for their callers.
    """


@dataclass(frozen=True, slots=True)
class ReadStats(EngineCommand[EngineStats]):
    """A reading at most a few steps old; requests still in the inbox count as waiting."""


_Error = TypeVar("_Error", bound=GenerationError)


def uncancellable_future() -> Future[Any]:
    """A future whose ``cancel`` does nothing, so that the loop can always resolve it."""
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
    """A copy: one exception that is raised in many places mixes their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
