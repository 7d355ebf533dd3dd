"""The messages of a connection: calls and aborts in one direction, ends in the other.

Each connection defines its own payloads, and further messages such as progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torchtitan_rl.types import GenerationRequest

P = TypeVar("P")
R = TypeVar("R")
E = TypeVar("E")

CallId = str | int
"""Unique among the calls that run: requests have their own ids, everything else a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[P]):
    """A request for work that ends once."""

    call_id: CallId
    payload: P


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The payload of a call that completes a request. ``streams``: its progress is reported within
    milliseconds; else a replica reports it about every second, and the controller never."""

    request: GenerationRequest
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End the call now. Unknown and ended ids are ignored."""

    call_id: CallId


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Generic[R, E]):
    """The end of one call: a result, or an error."""

    call_id: CallId
    result: R | None = None
    error: E | None = None
