"""What travels on a connection: calls one way, what becomes of them the other way.

Payloads, and messages that belong to no call, are those of the two sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")
R = TypeVar("R")
E = TypeVar("E")

CallId = str | int
"""Unique among the calls that run: requests have their own ids, everything else a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[P]):
    """Something that is to be done, and ends once."""

    call_id: CallId
    payload: P


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The call is to end now. Unknown and ended ids are ignored."""

    call_id: CallId


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Generic[R, E]):
    """The end of one call: a result, or an error."""

    call_id: CallId
    result: R | None = None
    error: E | None = None
