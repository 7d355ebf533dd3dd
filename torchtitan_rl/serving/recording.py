"""Records the exact turns of one session, and makes the session's report.

The tokens of one session, and of all sessions together, are bounded.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_rl.errors import GenerationError
from torchtitan_rl.rollout.calls import is_cancelled
from torchtitan_rl.rollout.episodes import (
    num_unseen_tokens,
    outcome_rewards,
    rollout_to_episodes,
    turns_by_episode,
)
from torchtitan_rl.routing.continuation import reported
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.report import SessionEnding, SessionReport
from torchtitan_rl.types import (
    Completion,
    Episode,
    GenerationRequest,
    Grammar,
    KeptRun,
    OnProgress,
    Progress,
    Rollout,
    RolloutStatus,
    SamplingParams,
    Turn,
)

TOKEN_BYTES = 72  # memory of one sampled token with its logprob
_RUN_BYTES = 120  # of a run of kept tokens, without their set
TURN_TOKENS = 64  # the memory of an empty turn, in tokens
STOP_TIMEOUT_S = 10.0  # for the router to return aborted requests


@dataclass(slots=True, kw_only=True, eq=False)
class SessionTurn:
    """One request of a session, without the options of its sampling but the temperature: an open
    session would hold them, however large. ``is_shifted``: whether penalties or biases that the
    loss does not know have changed the logits. While ``completion`` is None, the request runs, or
    has failed with ``lost_cause``."""

    request: GenerationRequest
    is_shifted: bool
    is_seen: bool = True  # its caller got, or may still get, the completion
    completion: Completion | None = None
    lost_cause: str = ""
    num_lost: int = 0  # tokens of a request that has failed
    branch_reward: float | None = None
    partial: list[Progress] = field(default_factory=list)  # progress while the request runs

    @property
    def num_tokens(self) -> int:
        if self.completion is not None:
            return len(self.completion.token_ids)
        return self.num_lost + sum(len(progress.token_ids) for progress in self.partial)

    @property
    def num_held(self) -> int:
        """Memory of the completion, with its sets of kept tokens, grammars and experts, as a number
        of tokens."""
        if self.completion is None:
            return 0
        kept = [one for _, one in self.completion.kept_tokens]
        num_bytes = _RUN_BYTES * len(kept)
        num_bytes += sum(len(one) for one in kept if isinstance(one, bytes))
        num_bytes += sum(len(one.data) for one in {one for one in kept if isinstance(one, Grammar)})
        if self.completion.routed_experts is not None:
            num_bytes += len(self.completion.routed_experts.data)
        return self.num_tokens + num_bytes // TOKEN_BYTES


class TokenBudget:
    """Limits the tokens of all open sessions together."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = 0

    def require(self, num_tokens: int = TURN_TOKENS) -> None:
        """Raise RefusedError if ``num_tokens`` more tokens do not fit."""
        if self.num_tokens + num_tokens > self._max_tokens:
            message = (
                f"all sessions together hold {self.num_tokens} of {self._max_tokens} tokens and "
                f"{num_tokens} more do not fit: close some, or try again later"
            )
            raise RefusedError(429, "sessions_full", message)


@dataclass(kw_only=True, eq=False)
class SessionRecording:
    """The turns of one open session. ``on_change`` is called whenever the session's report has
    changed.

    When a request starts, the largest number of tokens that its turn can hold is reserved in the
    budget; what it did not use is released when it ends, and all when the session ends. Memory for
    the sets of kept tokens, whose size is not known before, is reserved when the request ends.
    """

    session_id: str
    router: GeneratorRouter
    budget: TokenBudget
    max_held_tokens: int
    on_change: Callable[[], None]
    turns: list[SessionTurn] = field(default_factory=list)
    running: dict[str, tuple[SessionTurn, asyncio.Task[Completion]]] = field(default_factory=dict)
    _held_tokens: int = 0  # prompts and completions
    _reserved_tokens: int = 0  # in the budget
    _is_freed: bool = False

    def report(self, ending: SessionEnding | None, reward: float | None) -> SessionReport:
        """Make the session's report, with episodes if the session ended with a reward, which is the
        advantage of every token, because a session has no siblings.

        Masked are tokens of turns that their caller never got, of logits that penalties or biases
        have shifted, of unknown sets of kept candidates, and of logprobs that are not finite.
        Tokens of failed requests and of sessions without a reward are discarded.
        """
        turns = self.turns
        done = [turn for turn in turns if turn.completion is not None]
        discarded = Counter({"": 0})
        for turn in turns:
            if turn.lost_cause:
                discarded[turn.lost_cause] += turn.num_tokens
        masked: Counter[str] = Counter()
        episodes: tuple[Episode, ...] = ()
        temperatures: list[tuple[float, ...]] = []
        if ending is SessionEnding.REWARDED and reward is not None:
            rollout = _rollout(self.session_id, done, reward)
            known = rollout_to_episodes(rollout, outcome_rewards(rollout))
            episodes = tuple(map(_without_nonfinite, known))
            pairs = zip(rollout.turns, done, strict=True)
            temperature_of = {
                id(turn): sampled.request.sampling.temperature for turn, sampled in pairs
            }
            temperatures = [
                tuple(sorted({temperature_of[id(turn)] for turn in branch}))
                for branch in turns_by_episode(rollout)
            ]
            masked["unseen_turn"] = num_unseen_tokens(rollout)
            masked["shifted_sampling"] = sum(
                turn.num_tokens for turn in done if turn.is_shifted and turn.is_seen
            )
            unknown = sum(episode.num_unknown_tokens for episode in known)
            masked["truncated_sampling"] = unknown - masked["shifted_sampling"]
            masked["nonfinite_logprob"] = _num_trained(known) - _num_trained(episodes)
        elif ending is not None:
            discarded[ending.value] += sum(turn.num_tokens for turn in done)
        return SessionReport(
            session_id=self.session_id,
            ending=ending,
            reward=reward,
            temperatures=tuple(sorted({turn.request.sampling.temperature for turn in done})),
            turns=len(done),
            unseen_turns=sum(not turn.is_seen for turn in done),
            running_requests=sum(turn.completion is None and not turn.lost_cause for turn in turns),
            tokens_generated=sum(turn.num_tokens for turn in turns),
            tokens_trained=_num_trained(episodes),
            tokens_masked=dict(+masked),
            tokens_discarded=dict(+discarded),
            episodes=episodes,
            episode_temperatures=tuple(temperatures),
        )

    async def complete(
        self, request: GenerationRequest, on_progress: OnProgress | None
    ) -> Completion:
        """Complete a request as the session's next turn.

        Raises:
            RefusedError: this session, or all sessions together, hold too many tokens; or the
                session was closed during the request.
            GenerationError: the router failed to complete the request.
        """
        if request.request_id in self.running:
            message = f"request {request.request_id!r} is running already"
            raise RefusedError(400, "invalid_request", message)
        num_tokens = _prompt_tokens(request)
        if self._held_tokens + num_tokens > self.max_held_tokens:
            message = f"session {self.session_id!r} holds as many tokens as it may: close it"
            raise RefusedError(400, "session_full", message)
        self.budget.require(most_tokens(request))
        self._held_tokens += num_tokens
        self._reserve(most_tokens(request))
        own = request.sampling
        kept = SamplingParams(max_tokens=own.max_tokens, temperature=own.temperature)
        turn = SessionTurn(request=replace(request, sampling=kept), is_shifted=own.shifts_logits)
        self.turns.append(turn)
        sampling = asyncio.ensure_future(self._sample(turn, request, on_progress))
        self.running[request.request_id] = (turn, sampling)
        try:
            completion = await asyncio.shield(sampling)
        except asyncio.CancelledError as error:
            if not is_cancelled():  # `stop` cancelled the sampling, not this call
                raise session_closed(self.session_id) from error
            turn.is_seen = False
            self.on_change()
            await asyncio.shield(self.stop([request.request_id]))
            raise
        if not turn.is_seen:
            raise session_closed(self.session_id)
        return completion

    @property
    def request_ids(self) -> list[str]:
        return [turn.request.request_id for turn in self.turns]

    def reward_turns(self, request_ids: Collection[str], reward: float) -> None:
        for turn in self.turns:
            if turn.request.request_id in request_ids:
                turn.branch_reward = reward

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
                await self.router.abort(list(request_ids))
                await asyncio.wait(tasks)
        except TimeoutError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def free(self) -> None:
        """Release all reserved tokens, because the session has ended, and reserve nothing more."""
        self._reserve(-self._reserved_tokens)
        self._is_freed = True

    async def _sample(
        self, turn: SessionTurn, request: GenerationRequest, on_progress: OnProgress | None
    ) -> Completion:
        def note(progress: Progress) -> None:
            # Needed if the router does not return an aborted request in time.
            turn.partial.append(replace(progress, top_logprobs=()))
            if on_progress is not None and turn.is_seen:
                on_progress(progress)

        self.on_change()
        try:
            completion = await self.router.generate(request, None if on_progress is None else note)
            # Only the client needs the other scores.
            turn.completion = replace(completion, top_logprobs=(), prompt_scores=None)
            return completion
        except asyncio.CancelledError:  # the router did not return the aborted request in time
            turn.completion = reported(request.request_id, turn.partial)
            raise
        except Exception as error:
            is_expected = isinstance(error, GenerationError)
            turn.lost_cause = "generation_error" if is_expected else "internal_error"
            turn.num_lost = turn.num_tokens
            raise
        finally:
            turn.partial.clear()
            del self.running[request.request_id]
            self._held_tokens += turn.num_held
            self._reserve(turn.num_held - request.sampling.max_tokens)
            self.on_change()

    def _reserve(self, num_tokens: int) -> None:
        if not self._is_freed:
            self._reserved_tokens += num_tokens
            self.budget.num_tokens += num_tokens


def session_closed(session_id: str, report: SessionReport | None = None) -> RefusedError:
    how = f" ({report.ending.value})" if report is not None and report.ending else ""
    message = f"session {session_id!r} is closed{how}; begin another one"
    return RefusedError(400, "session_closed", message)


def most_tokens(request: GenerationRequest) -> int:
    """The number of tokens that a turn may hold at most."""
    return TURN_TOKENS + _prompt_tokens(request) + request.sampling.max_tokens


def _prompt_tokens(request: GenerationRequest) -> int:
    """Memory of the prompt, with its images, as a number of tokens."""
    num_bytes = sum(len(one.data) for one in request.images)
    return len(request.prompt_token_ids) + num_bytes // TOKEN_BYTES


def _rollout(session_id: str, turns: Sequence[SessionTurn], reward: float) -> Rollout:
    made = []
    for turn in turns:
        assert turn.completion is not None
        unknown = replace(turn.completion, kept_tokens=(KeptRun(0, None),))
        made.append(
            Turn(
                prompt_token_ids=turn.request.prompt_token_ids,
                images=turn.request.images,
                completion=unknown if turn.is_shifted else turn.completion,
                is_seen=turn.is_seen,
                branch_reward=turn.branch_reward,
            )
        )
    return Rollout(
        rollout_id=session_id,
        group_id=session_id,
        problem_id=session_id,
        turns=tuple(made),
        status=RolloutStatus.COMPLETED,
        reward=reward,
    )


def _num_trained(episodes: Sequence[Episode]) -> int:
    return sum(episode.num_trained_tokens for episode in episodes)


def _without_nonfinite(episode: Episode) -> Episode:
    mask = tuple(
        trained and math.isfinite(logprob)
        for trained, logprob in zip(episode.loss_mask, episode.logprobs, strict=True)
    )
    if mask == episode.loss_mask:
        return episode

    def kept(values: Sequence[Any], other: Any) -> tuple[Any, ...]:
        return tuple(v if trained else other for v, trained in zip(values, mask, strict=True))

    return replace(
        episode,
        loss_mask=mask,
        logprobs=kept(episode.logprobs, 0.0),
        advantages=kept(episode.advantages, 0.0),
        versions=kept(episode.versions, -1),
    )
