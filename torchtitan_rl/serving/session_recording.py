"""Records the exact turns of a session that no training run drives.

Invariants: a request whose caller is gone, or whose session ends, is aborted at the router; its
tokens are recorded as an unseen turn, and masked. The tokens of one session, and of all sessions
together, are bounded: a request reserves the most tokens that it may need (without the kept ones,
which are reserved when they are known), and releases the rest at its end; the session's end
releases all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Protocol

from torchtitan_rl.errors import GenerationError
from torchtitan_rl.rollout.calls import is_cancelled
from torchtitan_rl.routing.continuation import reported
from torchtitan_rl.serving.context import choices_of_response, requests_of_response
from torchtitan_rl.serving.messages import RefusedError, refused
from torchtitan_rl.serving.session_report import (
    SessionEnding,
    SessionReport,
    SessionTurn,
    session_report,
)
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress, Progress

TURN_TOKENS = 64  # what a turn costs on top of its tokens, in tokens
STOP_TIMEOUT_S = 10.0  # for the router to return what it aborted


class Router(Protocol):
    """The part of the router that sessions use."""

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None, /
    ) -> Completion: ...

    async def abort(self, request_ids: Collection[str], /) -> None: ...


def session_closed(session_id: str, report: SessionReport | None = None) -> RefusedError:
    how = f" ({report.ending.value})" if report is not None and report.ending else ""
    return refused(
        400, "session_closed", f"session {session_id!r} is closed{how}; begin another one"
    )


def most_tokens(request: GenerationRequest) -> int:
    """The most tokens that a turn may hold."""
    return TURN_TOKENS + len(request.prompt_token_ids) + request.sampling.max_tokens


class TokenBudget:
    """Limits the tokens of all open sessions together."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = 0

    def require(self, num_tokens: int = TURN_TOKENS) -> None:
        """Raises:
        RefusedError: so many do not fit.
        """
        if self.num_tokens + num_tokens > self._max_tokens:
            message = (
                f"all sessions together hold {self.num_tokens} of {self._max_tokens} tokens and "
                f"{num_tokens} more do not fit: close some, or try again later"
            )
            raise refused(429, "sessions_full", message)


class SessionRecording:
    """The turns of one open session. ``on_change`` is called whenever its report has changed."""

    def __init__(
        self,
        session_id: str,
        router: Router,
        budget: TokenBudget,
        *,
        max_held_tokens: int,
        on_change: Callable[[], None],
    ) -> None:
        self._session_id = session_id
        self._router = router
        self._budget = budget
        self._max_held_tokens = max_held_tokens
        self._on_change = on_change
        self._held_tokens = 0  # prompts and completions
        self._reserved_tokens = 0  # of the budget
        self._is_freed = False
        self.turns: list[SessionTurn] = []
        self.running: dict[str, tuple[SessionTurn, asyncio.Task[Completion]]] = {}

    def report(self, ending: SessionEnding | None, reward: float | None) -> SessionReport:
        return session_report(self._session_id, self.turns, ending=ending, reward=reward)

    async def complete(
        self, request: GenerationRequest, on_progress: OnProgress | None
    ) -> Completion:
        """Complete a request as the session's next turn.

        Raises:
            RefusedError: the session or all sessions are full, or it was closed meanwhile.
            GenerationError: as the router says.
        """
        if request.request_id in self.running:
            raise refused(
                400, "invalid_request", f"request {request.request_id!r} is running already"
            )
        num_tokens = len(request.prompt_token_ids)
        if self._held_tokens + num_tokens > self._max_held_tokens:
            raise refused(
                400,
                "session_full",
                f"session {self._session_id!r} holds as many tokens as it may: close it",
            )
        self._budget.require(most_tokens(request))
        self._held_tokens += num_tokens
        self._reserve(most_tokens(request))
        turn = SessionTurn.of(request)
        self.turns.append(turn)
        sampling = asyncio.ensure_future(self._sample(turn, request, on_progress))
        self.running[request.request_id] = (turn, sampling)
        try:
            completion = await asyncio.shield(sampling)
        except asyncio.CancelledError as error:
            if not is_cancelled():  # the sampling was cancelled, by `stop`, and not this caller
                raise session_closed(self._session_id) from error
            turn.is_seen = False
            self._on_change()
            await asyncio.shield(self.stop([request.request_id]))
            raise
        if not turn.is_seen:
            raise session_closed(self._session_id)
        return completion

    def reward_response(self, response_id: str, choice: int | None, reward: float) -> int:
        """Give the turns of a response a reward; returns their number."""
        request_ids = [turn.request_id for turn in self.turns]
        found = set(requests_of_response(request_ids, response_id, choice))
        rewarded = [turn for turn in self.turns if turn.request_id in found]
        for turn in rewarded:
            turn.branch_reward = reward
        return len(rewarded)

    def choices_of(self, response_id: str) -> list[int]:
        """The choices of a response; none where there is no such response."""
        request_ids = [turn.request_id for turn in self.turns]
        return choices_of_response(request_ids, response_id)

    async def stop(self, request_ids: Collection[str]) -> None:
        """Abort requests, and wait until their turns are recorded."""
        stopped = [self.running[name] for name in request_ids if name in self.running]
        tasks = [task for _, task in stopped]
        for turn, _ in stopped:
            turn.is_seen = False
        if not tasks:
            return
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._router.abort(list(request_ids))
                await asyncio.wait(tasks)
        except TimeoutError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def free(self) -> None:
        """The session has ended: return what it has reserved, and reserve nothing more."""
        self._reserve(-self._reserved_tokens)
        self._is_freed = True

    async def _sample(
        self, turn: SessionTurn, request: GenerationRequest, on_progress: OnProgress | None
    ) -> Completion:
        def note(progress: Progress) -> None:
            # Kept for a router that does not return an aborted request in time.
            turn.partial.append(replace(progress, top_logprobs=()))
            if on_progress is not None and turn.is_seen:
                on_progress(progress)

        self._on_change()
        try:
            completion = await self._router.generate(request, None if on_progress is None else note)
            turn.completion = replace(completion, top_logprobs=())  # for the client alone
            turn.partial.clear()
            self._held_tokens += turn.num_held
            return completion
        except asyncio.CancelledError:  # the router did not return the aborted request in time
            turn.completion = reported(request.request_id, turn.partial)
            raise
        except Exception as error:
            is_expected = isinstance(error, GenerationError)
            turn.lost_cause = "generation_error" if is_expected else "internal_error"
            raise
        finally:
            del self.running[request.request_id]
            self._reserve(turn.num_held - request.sampling.max_tokens)
            self._on_change()

    def _reserve(self, num_tokens: int) -> None:
        if not self._is_freed:
            self._reserved_tokens += num_tokens
            self._budget.num_tokens += num_tokens
