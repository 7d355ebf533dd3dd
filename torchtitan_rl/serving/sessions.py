"""Sessions: which rollout a request belongs to, and what its exact tokens were.

A request without a session goes straight to the router. A session that a training run drives hands
its requests to the run's rollout; of any other session, which its first request opens, the exact
turns are recorded, and closing it with a reward makes episodes of them.

Invariants: a session ends exactly once, and refuses whatever comes later (``session_closed``). A
request whose caller is gone, or whose session closes, is aborted at the router; what it had sampled
is recorded as a turn that nobody saw, and masked. Tokens add up, of each session and of all of them
(`SessionReport`). An open session whose requests and rewards fail to come ends by the time-out; of
an ended session only its id and its counts are kept. What a session holds is bounded, however
long it goes on, and so is what all of them hold together: a request reserves all that it may come
to, gives back what it did not, and the session's end frees the rest. Event loop only; no lock, no
task of its own.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torchtitan_rl.errors import GenerationError
from torchtitan_rl.rollout.calls import is_cancelled
from torchtitan_rl.serving.messages import CommandName, Handler, RefusedError
from torchtitan_rl.serving.refusals import refused
from torchtitan_rl.serving.session_checks import checked_reward, closed, text_argument
from torchtitan_rl.serving.session_counts import SessionCounts
from torchtitan_rl.serving.session_record import (
    SessionEnding,
    SessionReport,
    SessionTurn,
    session_report,
)
from torchtitan_rl.serving.session_room import MAX_TOTAL_TOKENS, SessionRoom, most_tokens
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress, Progress

MAX_ENDED = 100_000  # ended sessions that are remembered
MAX_HELD_TOKENS = 1 << 24  # of the prompts and completions of one session; about 0.6 GB
_STOP_TIMEOUT_S = 10.0  # for the router to give back what it aborted


class Completes(Protocol):
    """What sessions need of the router."""

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None, /
    ) -> Completion: ...

    async def abort(self, request_ids: Collection[str], /) -> None: ...


class SessionDriver(Protocol):
    """The rollout that a session belongs to."""

    async def complete(self, request: GenerationRequest, /) -> Completion:
        """Answer a request with a turn of the rollout. Cancelled where its caller is gone.

        Raises:
            RefusedError: the rollout takes no such request, or none any more.
        """
        ...

    def close_session(self, reward: float | None, /) -> None:
        """Somebody closed the session by a command: the rollout is over, or gets no more turns."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Session:
    session_id: str
    driver: SessionDriver | None
    used_s: float = 0.0  # when something happened last, in the event loop's time
    turns: list[SessionTurn] = field(default_factory=list)
    running: dict[str, tuple[SessionTurn, asyncio.Task[Completion]]] = field(default_factory=dict)
    held_tokens: int = 0  # prompts and completions
    reserved_tokens: int = 0  # its part of the tokens of all sessions
    driven_turns: int = 0
    is_closing: bool = False
    timer: asyncio.TimerHandle | None = None


class Sessions:
    """All sessions of one router.

    ``keep`` stores what a rewarded session came to before it ends; where it raises OSError the
    session stays open, and can be closed again.
    """

    def __init__(
        self,
        router: Completes,
        *,
        timeout_s: float = 600.0,
        max_sessions: int = 10_000,
        max_held_tokens: int = MAX_HELD_TOKENS,
        max_total_tokens: int = MAX_TOTAL_TOKENS,
        keep: Callable[[SessionReport], None] | None = None,
    ) -> None:
        self._router = router
        self._keep = keep
        self._max_held_tokens = max_held_tokens
        self._room = SessionRoom(max_total_tokens)
        self._timeout_s = timeout_s
        self._max_sessions = max_sessions
        self._open: dict[str, _Session] = {}
        self._ended: OrderedDict[str, SessionReport] = OrderedDict()
        self._counts = SessionCounts()
        self._changed: dict[str, _Session] = {}  # since they were counted last
        self._is_closed = False

    async def complete(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        """Complete one request; its ``session_id`` says for whom.

        In a session that a run drives ``on_progress`` is not called.

        Raises:
            RefusedError: its session is closed, does not take it, or there are too many.
            GenerationError: as the router says.
        """
        if request.session_id is None:
            return await self._router.generate(request, on_progress)
        session = self._open.get(request.session_id)
        if session is None:
            if request.session_id not in self._ended:
                self._room.require(most_tokens(request))
            session = self._new(request.session_id)
        if session.is_closing:
            raise closed(session.session_id)
        if session.driver is None:
            return await self._record(session, request, on_progress)
        completion = await session.driver.complete(request)
        session.driven_turns += 1
        self._note_use(session)
        return completion

    def open(self, session_id: str | None = None) -> str:
        """Open a session by name, or under a new one that nobody can guess.

        Raises:
            RefusedError: there is, or was, one of that name, or there are too many.
        """
        session_id = session_id or secrets.token_hex(16)
        if session_id in self._open:
            raise refused(400, "session_exists", f"session {session_id!r} is open already")
        if session_id not in self._ended:
            self._room.require()
        return self._new(session_id).session_id

    def drive(self, driver: SessionDriver) -> str:
        """A new session, all of whose requests go to ``driver`` until `release`."""
        return self._new(secrets.token_hex(16), driver).session_id

    def release(self, session_id: str, ending: SessionEnding, reward: float | None = None) -> None:
        """A driven session is over; nothing happens where it is already."""
        session = self._open.get(session_id)
        if session is not None:
            self._end(session, ending, reward)

    async def close(self, session_id: str, reward: float | None = None) -> SessionReport:
        """End a session, with its requests; with a reward it becomes episodes.

        Raises:
            RefusedError: it is not open (any more), the reward is no finite number, or its
                episodes could not be kept.
        """
        value = checked_reward(reward)
        session = self._open.get(session_id)
        if session is None or session.is_closing:
            raise self._missing(session_id)
        ending = SessionEnding.UNREWARDED if value is None else SessionEnding.REWARDED
        session.is_closing = True
        if session.driver is not None:
            session.driver.close_session(value)
        else:
            await self._stop(session, list(session.running))
            self._keep_report(session, self._report(session, ending, value))
        return self._end(session, ending, value)

    def read(self, session_id: str) -> SessionReport:
        """A session as it is; of an ended one its counts.

        Raises:
            RefusedError: no such session is known.
        """
        session = self._open.get(session_id)
        if session is not None:
            return self._report(session, None, None)
        if session_id in self._ended:
            return self._ended[session_id]
        raise self._missing(session_id)

    def handlers(self) -> Mapping[CommandName, Handler]:
        """The commands that clients may give."""
        return {
            "session.open": self._on_open,
            "session.close": self._on_close,
            "session.read": self._on_read,
        }

    def counts(self) -> Mapping[str, float]:
        """Since the start, all sessions together: gauges and counters, by name.

        ``session_tokens_held`` is what open sessions have reserved of what all may hold.
        ``session_tokens_generated`` is the sum of those trained, masked, discarded and pending;
        sessions that a run drives count as sessions, not in the tokens.
        """
        for session in self._changed.values():
            self._counts.take(self._report(session, None, None))
        self._changed = {s.session_id: s for s in self._changed.values() if s.running}
        return {**self._counts.read(), "session_tokens_held": self._room.num_tokens}

    async def aclose(self) -> None:
        """End all sessions and their requests; nothing is taken any more."""
        self._is_closed = True
        sessions = list(self._open.values())
        for session in sessions:
            session.is_closing = True
            if session.driver is not None:
                session.driver.close_session(None)
        await asyncio.gather(*(self._stop(session, list(session.running)) for session in sessions))
        for session in sessions:
            self._end(session, SessionEnding.SHUTDOWN, None)

    async def _record(
        self, session: _Session, request: GenerationRequest, on_progress: OnProgress | None
    ) -> Completion:
        if request.request_id in session.running:
            raise refused(
                400, "invalid_request", f"request {request.request_id!r} is running already"
            )
        num_tokens = len(request.prompt_token_ids)
        if session.held_tokens + num_tokens > self._max_held_tokens:
            raise refused(
                400,
                "session_full",
                f"session {session.session_id!r} holds as many tokens as it may: close it",
            )
        self._room.require(most_tokens(request))
        session.held_tokens += num_tokens
        self._reserve(session, most_tokens(request))
        turn = SessionTurn.of(request)
        session.turns.append(turn)
        sampling = asyncio.ensure_future(self._sample(session, turn, request, on_progress))
        session.running[request.request_id] = (turn, sampling)
        try:
            completion = await asyncio.shield(sampling)
        except asyncio.CancelledError as error:
            if not is_cancelled():  # `_stop` gave up waiting
                raise closed(session.session_id) from error
            turn.is_seen = False
            self._note_use(session)
            await asyncio.shield(self._stop(session, [request.request_id]))
            raise
        if not turn.is_seen:
            raise closed(session.session_id)
        return completion

    async def _sample(
        self,
        session: _Session,
        turn: SessionTurn,
        request: GenerationRequest,
        on_progress: OnProgress | None,
    ) -> Completion:
        """Sample one turn to its end, whoever waits for it."""

        def note(progress: Progress) -> None:
            # For a router that does not give back what it aborts.
            turn.known.append(replace(progress, top_logprobs=()))
            if on_progress is not None and turn.is_seen:
                on_progress(progress)

        self._note_use(session)
        try:
            completion = await self._router.generate(request, None if on_progress is None else note)
            turn.completion = replace(completion, top_logprobs=())  # for the client alone
            turn.known.clear()
            session.held_tokens += turn.num_tokens
            return completion
        except asyncio.CancelledError:  # the router did not give back what it aborted
            turn.cut(request.request_id)
            raise
        except Exception as error:
            is_known = isinstance(error, GenerationError)
            turn.lost_cause = "generation_error" if is_known else "internal_error"
            raise
        finally:
            del session.running[request.request_id]
            self._reserve(session, turn.num_tokens - request.sampling.max_tokens)
            self._note_use(session)

    async def _stop(self, session: _Session, request_ids: Collection[str]) -> None:
        """Abort requests, and wait until their turns are recorded."""
        stopped = [session.running[name] for name in request_ids if name in session.running]
        tasks = [task for _, task in stopped]
        for turn, _ in stopped:
            turn.is_seen = False
        if not tasks:
            return
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._router.abort(list(request_ids))
                await asyncio.wait(tasks)
        except TimeoutError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _new(self, session_id: str, driver: SessionDriver | None = None) -> _Session:
        if session_id in self._ended:
            raise closed(session_id, self._ended[session_id])
        if self._is_closed:
            raise refused(503, "shutting_down", "the server is shutting down")
        if driver is None and len(self._open) >= self._max_sessions:
            message = f"{len(self._open)} sessions are open: close some, or try again later"
            raise refused(429, "too_many_sessions", message)
        session = _Session(session_id=session_id, driver=driver)
        self._open[session_id] = session
        self._note_use(session)
        if driver is None:
            self._watch(session, self._timeout_s)
        return session

    def _reserve(self, session: _Session, num_tokens: int) -> None:
        """Take tokens, or give back where they are negative; nothing once it has ended."""
        if self._open.get(session.session_id) is session:
            session.reserved_tokens += num_tokens
            self._room.take(num_tokens)

    def _note_use(self, session: _Session) -> None:
        session.used_s = _now()
        if self._open.get(session.session_id) is session:  # else it has been counted as ended
            self._changed[session.session_id] = session

    def _watch(self, session: _Session, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        session.timer = loop.call_later(delay_s, self._abandon_idle, session)

    def _abandon_idle(self, session: _Session) -> None:
        idle_s = 0.0 if session.running or session.is_closing else _now() - session.used_s
        if idle_s >= self._timeout_s:
            self._end(session, SessionEnding.ABANDONED, None)
        else:
            self._watch(session, self._timeout_s - idle_s)

    def _end(self, session: _Session, ending: SessionEnding, reward: float | None) -> SessionReport:
        report = self._report(session, ending, reward)
        if self._open.pop(session.session_id, None) is None:
            return self._ended.get(session.session_id, report)
        self._changed.pop(session.session_id, None)
        self._room.take(-session.reserved_tokens)
        if session.timer is not None:
            session.timer.cancel()
        self._ended[session.session_id] = replace(report, episodes=())
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._counts.take(report)
        return report

    def _keep_report(self, session: _Session, report: SessionReport) -> None:
        if self._keep is None or not report.episodes:
            return
        try:
            self._keep(report)
        except OSError as error:
            session.is_closing = False
            message = f"the session is still open, for its episodes could not be written: {error}"
            raise refused(503, "episodes_not_written", message) from error

    def _report(
        self, session: _Session, ending: SessionEnding | None, reward: float | None
    ) -> SessionReport:
        if session.driver is None:
            return session_report(session.session_id, session.turns, ending=ending, reward=reward)
        return SessionReport(
            session_id=session.session_id,
            ending=ending,
            reward=reward,
            turns=session.driven_turns,
        )

    def _missing(self, session_id: str) -> RefusedError:
        if session_id in self._open or session_id in self._ended:
            return closed(session_id, self._ended.get(session_id))
        return refused(404, "session_not_found", f"there is no session {session_id!r}")

    async def _on_open(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        session_id = text_argument(arguments, "session_id") if arguments.get("session_id") else None
        return {"session_id": self.open(session_id)}

    async def _on_close(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        report = await self.close(text_argument(arguments, "session_id"), arguments.get("reward"))
        return report.to_json()

    async def _on_read(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.read(text_argument(arguments, "session_id")).to_json()


def _now() -> float:
    return asyncio.get_running_loop().time()
