"""Sessions: assigns requests to rollouts, and records their exact tokens.

- A request without a session goes straight to the router.
- A request of a session that a training run drives goes to the run's rollout (`SessionDriver`).
- Any other session is opened by a command or by its first request. Its exact turns are recorded,
  and become episodes when the session is closed with a reward.

Invariants: a session ends exactly once, also after the timeout without requests and rewards, and
refuses all later requests (``session_closed``); only its id and its counts are kept. A request
whose caller is gone, or whose session ends, is aborted at the router; its tokens are recorded as an
unseen turn, and masked. The tokens of one session, and of all sessions together, are bounded.
Sessions are used on one event loop only, and start no background tasks.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol

from torchtitan_rl.aio import loop_s
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import CommandName, Handler, handler
from torchtitan_rl.serving.middleware import DRIVEN
from torchtitan_rl.serving.recording import (
    TURN_TOKENS,
    SessionRecording,
    TokenBudget,
    most_tokens,
    session_closed,
)
from torchtitan_rl.serving.report import (
    SessionCounts,
    SessionEnding,
    SessionReport,
    choices_of_response,
)
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress

MAX_SESSIONS = 10_000  # open at once
MAX_ENDED = 100_000  # ended sessions that are remembered
MAX_HELD_TOKENS = 1 << 24  # prompts and completions of one session; about 1.2 GB
MAX_TOTAL_TOKENS = 1 << 26  # all open sessions together; about 4.8 GB


class SessionDriver(Protocol):
    """The rollout that a session belongs to."""

    @property
    def request_ids(self) -> Iterable[str]:
        """The ids of the requests that were answered with turns of the rollout."""

    async def complete(
        self, request: GenerationRequest, on_progress: OnProgress | None = None, /
    ) -> Completion:
        """Answer a request with a turn of the rollout. Cancelled when its caller is gone. Raises
        RefusedError: the rollout refuses this request, or accepts no more requests."""

    def reward_turns(self, request_ids: Collection[str], reward: float, /) -> None:
        """Give the branches with these turns a reward of their own."""

    def close_session(self, reward: float | None, /) -> None:
        """End the rollout with this reward, because a client closed the session. If ``reward`` is
        None, the rollout accepts no further requests, but its agent may still end it with a reward
        of its own."""


@dataclass(slots=True, eq=False)
class _Session:
    """An open session: recorded, or driven by a rollout."""

    session_id: str
    recording: SessionRecording | None = None
    driver: SessionDriver | None = None
    driven_turns: int = 0
    used_s: float = 0.0  # time of the last event, on the event loop's clock
    is_closing: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self.recording is not None and bool(self.recording.running)

    def report(
        self, ending: SessionEnding | None = None, reward: float | None = None
    ) -> SessionReport:
        if self.recording is not None:
            return self.recording.report(ending, reward)
        return SessionReport(
            session_id=self.session_id, ending=ending, reward=reward, turns=self.driven_turns
        )

    async def stop(self, reward: float | None) -> None:
        """Accept no more requests, and end the running ones."""
        self.is_closing = True
        if self.driver is not None:
            self.driver.close_session(reward)
        if self.recording is not None:
            await self.recording.stop(list(self.recording.running))


@dataclass(eq=False)
class Sessions:
    """All sessions of one router.

    ``keep`` stores the report of a rewarded session before the session ends. If ``keep`` raises
    OSError, the session stays open, and can be closed again.
    """

    router: GeneratorRouter
    _: KW_ONLY
    timeout_s: float = 600.0
    max_held_tokens: int = MAX_HELD_TOKENS
    max_total_tokens: int = MAX_TOTAL_TOKENS
    keep: Callable[[SessionReport], None] | None = None

    def __post_init__(self) -> None:
        self._budget = TokenBudget(self.max_total_tokens)
        self._open: dict[str, _Session] = {}
        self._ended: OrderedDict[str, SessionReport] = OrderedDict()
        self._counts = SessionCounts()
        self._changed: dict[str, _Session] = {}  # changed since they were last counted
        self._is_closed = False

    async def complete(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        """Complete one request; its ``session_id`` names its session.

        Raises:
            RefusedError: the session is closed or refuses the request, or there are too many
                sessions.
            GenerationError: the router failed to complete the request.
        """
        if request.session_id is None:
            return await self.router.generate(request, on_progress)
        session_id = _without_part(request.session_id)
        session = self._open.get(session_id)
        if session is None:
            session = self._new(session_id, num_tokens=most_tokens(request))
        if session.is_closing:
            raise session_closed(session.session_id)
        if session.recording is not None:
            return await session.recording.complete(request, on_progress)
        assert session.driver is not None
        completion = await session.driver.complete(request, on_progress)
        session.driven_turns += 1
        self._note_use(session)
        return completion

    def open(self, session_id: str | None = None) -> str:
        """Open a session under a given id, or under a new one that cannot be guessed. Raises
        RefusedError: the id is or was in use, or there are too many sessions."""
        session_id = session_id or secrets.token_hex(16)
        if session_id in self._open:
            raise RefusedError(400, "session_exists", f"session {session_id!r} is open already")
        return self._new(session_id).session_id

    def drive(self, driver: SessionDriver) -> str:
        """Open a session whose requests all go to ``driver``, until `release`."""
        return self._new(DRIVEN + secrets.token_hex(16), driver).session_id

    def release(self, session_id: str, ending: SessionEnding, reward: float | None = None) -> None:
        """End a driven session. No effect if the session has already ended."""
        session = self._open.get(session_id)
        if session is not None:
            self._end(session, session.report(ending, reward))

    async def close(self, session_id: str, reward: float | None = None) -> SessionReport:
        """End a session and its requests. With a reward the session's turns become episodes. Raises
        RefusedError: the session is not open, or its episodes could not be stored."""
        session = self._open.get(session_id)
        if session is None or session.is_closing:
            raise self._missing(session_id)
        await session.stop(reward)
        ending = SessionEnding.UNREWARDED if reward is None else SessionEnding.REWARDED
        report = session.report(ending, reward)
        try:
            if self.keep is not None and report.episodes:
                self.keep(report)
        except OSError as error:
            session.is_closing = False
            message = f"the session is still open, for its episodes could not be written: {error}"
            raise RefusedError(503, "episodes_not_written", message) from error
        return self._end(session, report)

    def reward_branch(
        self, session_id: str, reward: float, *, response_id: str, choice: int | None = None
    ) -> SessionReport:
        """Give the branches of a response a reward of their own; the session stays open. Raises
        RefusedError: the session is not open, or has no such response."""
        session = self._open.get(session_id)
        if session is None or session.is_closing:
            raise self._missing(session_id)
        part = session.driver or session.recording
        assert part is not None
        choices = choices_of_response(part.request_ids, response_id)
        rewarded = [name for name, index in choices.items() if choice in (None, index)]
        if not rewarded:
            message = f"session {session_id!r} has no response {response_id!r}"
            if known := sorted(set(choices.values())):
                span = f"{known[0]} to {known[-1]}" if len(known) > 1 else f"{known[0]}"
                message = f"response {response_id!r} has no choice {choice} ({span})"
            raise RefusedError(404, "response_not_found", message)
        part.reward_turns(rewarded, reward)
        return session.report()

    def read(self, session_id: str) -> SessionReport:
        """The report of a session. For an ended session it has no episodes. Raises RefusedError: no
        such session was ever open, or it is no longer remembered."""
        session = self._open.get(session_id)
        if session is not None:
            return session.report()
        if session_id in self._ended:
            return self._ended[session_id]
        raise self._missing(session_id)

    def handlers(self) -> Mapping[CommandName, Handler]:
        """The handlers of clients' commands, whose arguments `routes` has checked."""

        async def close(**arguments: Any) -> Mapping[str, Any]:
            return (await self.close(**arguments)).to_json()

        return {
            "session.open": handler(lambda **given: {"session_id": self.open(**given)}),
            "session.close": handler(close),
            "session.reward_branch": handler(lambda **given: self.reward_branch(**given).to_json()),
            "session.read": handler(lambda **given: self.read(**given).to_json()),
        }

    def counts(self) -> Mapping[str, float]:
        """Gauges and counters over all sessions since the start, by name. ``session_tokens_held``:
        reserved by open sessions. Sessions that a run drives are counted, their tokens are not."""
        for session in self._changed.values():
            self._counts.update(session.report())
        self._changed = {s.session_id: s for s in self._changed.values() if s.is_running}
        return {**self._counts.read(), "session_tokens_held": self._budget.num_tokens}

    async def aclose(self) -> None:
        """End all sessions and their requests, and refuse all later ones."""
        self._is_closed = True
        sessions = list(self._open.values())
        await asyncio.gather(*(session.stop(None) for session in sessions))
        for session in sessions:
            self._end(session, session.report(SessionEnding.SHUTDOWN))

    def _new(
        self, session_id: str, driver: SessionDriver | None = None, *, num_tokens: int = TURN_TOKENS
    ) -> _Session:
        if session_id in self._ended:
            raise session_closed(session_id, self._ended[session_id])
        if self._is_closed:
            raise RefusedError(503, "shutting_down", "the server is shutting down")
        if driver is None and session_id.startswith(DRIVEN):
            raise session_closed(session_id)  # it belonged to a rollout before the run was resumed
        session = _Session(session_id, driver=driver)
        if driver is None:
            self._budget.require(num_tokens)
            if len(self._open) >= MAX_SESSIONS:
                message = f"{len(self._open)} sessions are open: close some, or try again later"
                raise RefusedError(429, "too_many_sessions", message)
            session.recording = SessionRecording(
                session_id=session_id,
                router=self.router,
                budget=self._budget,
                max_held_tokens=self.max_held_tokens,
                on_change=lambda: self._note_use(session),
            )
            self._watch(session, self.timeout_s)
        self._open[session_id] = session
        self._note_use(session)
        return session

    def _note_use(self, session: _Session) -> None:
        session.used_s = loop_s()
        if self._open.get(session.session_id) is session:  # an ended one was counted at its end
            self._changed[session.session_id] = session

    def _watch(self, session: _Session, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        session.timer = loop.call_later(delay_s, self._abandon_idle, session)

    def _abandon_idle(self, session: _Session) -> None:
        idle_s = 0.0 if session.is_running or session.is_closing else loop_s() - session.used_s
        if idle_s >= self.timeout_s:
            self._end(session, session.report(SessionEnding.ABANDONED))
        else:
            self._watch(session, self.timeout_s - idle_s)

    def _end(self, session: _Session, report: SessionReport) -> SessionReport:
        """End a session with ``report``. If the session has already ended, return its earlier
        report."""
        if self._open.pop(session.session_id, None) is None:
            return self._ended.get(session.session_id, report)
        self._changed.pop(session.session_id, None)
        if session.recording is not None:
            session.recording.free()
        if session.timer is not None:
            session.timer.cancel()
        self._ended[session.session_id] = replace(report, episodes=(), episode_temperatures=())
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._counts.update(report)
        return report

    def _missing(self, session_id: str) -> RefusedError:
        if session_id in self._open or session_id in self._ended:
            return session_closed(session_id, self._ended.get(session_id))
        return RefusedError(404, "session_not_found", f"there is no session {session_id!r}")


def _without_part(session_id: str) -> str:
    """The id of the session itself. For a driven session, clients may append a dot and the name of
    a part of its rollout."""
    return session_id.partition(".")[0] if session_id.startswith(DRIVEN) else session_id
