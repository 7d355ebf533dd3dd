"""Futures that an engine loop resolves, and errors that fail several of them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, TypeVar

from torchtitan_rl.errors import GenerationError

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
    """Fail it with a copy of ``error``."""
    future.set_exception(copy_of(error))


def copy_of(error: _Error) -> _Error:
    """One exception raised in many places mixes tracebacks, so each gets a copy."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
