"""The turns of a rollout whose environment requests several turns concurrently: a tree of branches.

Turns are recorded in the order in which their sampling ends. A turn's seed depends on its prompt
and on the number of earlier requests with this prompt, not on the order of other requests. Limits
apply to the whole tree, except the token limit, which applies to each branch.

When the environment restarts, every turn so far counts as unseen. A new request repeats a recorded
one if both have the same prompt, the same number of earlier requests with this prompt, and the same
options (stops, constraints, logprobs). If the recorded completion also fits the new budget, it is
the answer, and the turn counts as seen again. Any other request is sampled, as a new branch. Turns
that stay unseen are not trained on.

Invariants: each accepted request is answered, or the rollout ends with a cause. Each sampled
completion is in exactly one turn. After a limit is reached, the rollout ends as soon as the running
turns have ended.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol, TypeGuard

from torchtitan_rl.aio import cancel_all, deadline, uninterrupted
from torchtitan_rl.rollout.calls import compute, summary
from torchtitan_rl.rollout.env import Observation, Terminal, TokenEnv
from torchtitan_rl.routed_experts import num_known, of_new_tokens
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    OnProgress,
    RolloutStatus,
    SamplingParams,
    Turn,
)


class RolloutEnded(Exception):
    """The rollout has ended without a `Terminal`."""

    def __init__(self, status: RolloutStatus, cause: str) -> None:
        super().__init__(cause)
        self.status = status
        self.cause = cause


class LimitReachedError(Exception):
    """The rollout accepts no more requests."""


@dataclass(kw_only=True, eq=False)
class TurnTree:
    """The turns of one rollout. The environment calls `request`, `reward`, `expect` and `restart`;
    the rollout calls the other methods.

    ``limit`` is the status of the limit that was reached. ``num_asked`` and ``num_replayed`` count
    requests since the start or the last restart. ``unreplayed`` are the indices of recorded turns
    that were not requested again since. ``is_amended``: recorded turns were changed.
    """

    make_request: Callable[[int, Observation, str], GenerationRequest]
    """Builds a turn's request from the turn's number, observation and branch."""
    complete: Callable[[GenerationRequest, OnProgress | None], Awaitable[Completion | None]]
    """Samples a request; returns None when the rollout's time is over."""
    reached_limit: Callable[[Observation, int], RolloutStatus | None]
    """Returns the status of the limit that an observation reaches after a number of turns."""
    on_turns: Callable[[tuple[Turn, ...], bool], None]
    """Called after each change with all recorded turns, and whether the last one is new."""
    on_activity: Callable[[str | None, str], None]
    """Called with a request's id and "", or with None and the environment's activity."""
    start_time: Callable[[], None]
    """Starts the rollout's time-out."""
    step_timeout_s: float
    recorded: tuple[Turn, ...] = ()
    limit: RolloutStatus | None = None
    num_asked: int = 0
    num_replayed: int = 0
    is_amended: bool = False

    def __post_init__(self) -> None:
        self._turns: list[Turn] = []
        self._index_of: dict[str, int] = {}  # of recorded turns, by request id
        self._sampled: dict[str, Turn] = {}  # not recorded yet
        self._rewards: dict[str, float] = {}  # of turns that are not recorded yet
        self._running: set[asyncio.Task[None]] = set()
        self.unreplayed: list[int] = []
        self._num_like: Counter[str] = Counter()  # requests, by prompt
        self._failure: BaseException | None = None
        self._is_closed = False
        self._changed = asyncio.Event()
        self._expected = ("its first request", self.step_timeout_s)
        for turn in self.recorded:
            self._record(turn)
        ids = [turn.completion.request_id for turn in self._turns]
        numbers = [int(request_id.rpartition("/t")[2]) for request_id in ids]
        self._next_number = 1 + max(numbers, default=-1)
        self._forget_answers(replays=True)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All sampled turns, including those that are not recorded yet."""
        return (*self._turns, *self._sampled.values())

    @property
    def is_sampling(self) -> bool:
        return bool(self._running)

    # For the environment.

    def request(
        self,
        observation: Observation,
        answer: Callable[[Completion], bool],
        *,
        on_progress: OnProgress | None = None,
        decode: Callable[[tuple[int, ...]], str] | None = None,
    ) -> str:
        """Have a turn sampled, or answer it from the record. Returns the id of its request.

        ``answer`` is called once with the completion, unless the rollout ends first, and returns
        whether it reached its caller. ``decode`` converts the completion to the turn's text. Raises
        LimitReachedError: the rollout ends: a limit is reached, a turn failed, or the tree is
        closed.
        """
        if self._is_closed or self._failure is not None:
            raise LimitReachedError
        if self.limit is None:
            self.limit = self.reached_limit(observation, self.num_asked)
        if self.limit is not None:
            self._changed.set()
            raise LimitReachedError
        self.num_asked += 1
        digest, ordinal = self._count_like(observation)
        request = self.make_request(self._next_number, observation, f"{digest}.{ordinal}")
        key = f"{ordinal}.{_options_digest(request.sampling)}"
        replayed = self._replay(request, key, answer)
        if replayed is not None:
            return replayed
        self._next_number += 1
        task = asyncio.ensure_future(self._sample(request, key, answer, on_progress, decode))
        self._running.add(task)
        task.add_done_callback(self._on_sampled)
        self.on_activity(request.request_id, "")
        self._changed.set()
        return request.request_id

    def reward(self, request_id: str, reward: float) -> None:
        """Give the branch with this turn its own reward."""
        index = self._index_of.get(request_id)
        if index is None:
            self._rewards[request_id] = reward
        else:
            self._amend(index, branch_reward=reward)

    def expect(self, what: str, within_s: float | None = None) -> None:
        """Set what the rollout waits for while no turn is sampled, and how long it may wait:
        ``within_s`` seconds, or the step's time-out if ``within_s`` is None (`math.inf`: no limit).
        """
        self._expected = (what, within_s or self.step_timeout_s)
        self._report_idle()

    async def restart(self, *, replays: bool) -> None:
        """Let the environment start again. Returns once the running turns have ended. Raises
        LimitReachedError: a limit is reached. Seen turns still count as seen."""
        if self._running:
            await asyncio.wait(self._running)
        if self.limit is not None:
            raise LimitReachedError
        self._forget_answers(replays=replays)
        self.on_turns(tuple(self._turns), False)

    # For the rollout.

    async def watch(self, work: asyncio.Task[Any]) -> None:
        """Wait until the environment's ``work`` has ended or a limit is reached, and no turn is
        being sampled. Raises RolloutEnded: a turn failed, or the environment did not request
        another turn in time."""
        work.add_done_callback(lambda _: self._changed.set())
        while self._running or not (work.done() or self.limit):
            if self._failure is not None:
                break
            self._changed.clear()
            what, patience_s = self._expected
            is_limited = not self._running and patience_s != math.inf
            try:
                async with deadline(patience_s if is_limited else None):
                    await self._changed.wait()
            except TimeoutError:
                cause = f"agent: no answer after {patience_s} s: waited for {what}"
                raise RolloutEnded(RolloutStatus.STEP_TIMEOUT, cause) from None
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Cancel all sampling, and accept no more requests. All sampling has ended when this
        returns, even by cancellation, so that all tokens are counted."""
        self._is_closed = True
        await uninterrupted(cancel_all(self._running))

    async def _sample(
        self,
        request: GenerationRequest,
        key: str,
        answer: Callable[[Completion], bool],
        on_progress: OnProgress | None,
        decode: Callable[[tuple[int, ...]], str] | None,
    ) -> None:
        known = num_known(request.prompt_token_ids, self._turns)
        completion = await self.complete(replace(request, routed_from=known), on_progress)
        if completion is None:
            self.limit = self.limit or RolloutStatus.ROLLOUT_TIMEOUT
            return
        turn = Turn(
            prompt_token_ids=request.prompt_token_ids,
            completion=completion,
            request_key=key,
            images=request.images,
        )
        turn = of_new_tokens(turn, self._turns)
        self._sampled[request.request_id] = turn
        try:
            if completion.finish_reason is FinishReason.ABORT:
                cause = f"{completion.request_id}: aborted, but not by this rollout"
                raise RolloutEnded(RolloutStatus.GENERATION_ERROR, cause)
            if decode is not None:
                turn = replace(turn, text=await compute(decode, completion.token_ids))
        except Exception as error:
            if isinstance(error, RolloutEnded):
                raise
            raise RolloutEnded(RolloutStatus.ENV_ERROR, f"decode: {summary(error)}") from error
        finally:
            del self._sampled[request.request_id]
            self._record(
                replace(
                    turn,
                    is_seen=answer(completion),
                    branch_reward=self._rewards.pop(request.request_id, None),
                )
            )
            self.on_turns(tuple(self._turns), True)

    def _on_sampled(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._report_idle()

    def _report_idle(self) -> None:
        if not self._running:
            self.on_activity(None, f"waits for {self._expected[0]}")
        self._changed.set()

    def _record(self, turn: Turn) -> None:
        self._index_of[turn.completion.request_id] = len(self._turns)
        self._turns.append(turn)

    def _amend(self, index: int, **changes: Any) -> None:
        self._turns[index] = replace(self._turns[index], **changes)
        self.is_amended = True
        self.on_turns(tuple(self._turns), False)

    def _replay(
        self, request: GenerationRequest, key: str, answer: Callable[[Completion], bool]
    ) -> str | None:
        for index in self.unreplayed:
            turn = self._turns[index]
            if turn.request_key == key and _answers(turn, request):
                self.unreplayed.remove(index)
                self.num_replayed += 1
                self._amend(index, is_seen=answer(turn.completion))
                self._report_idle()
                return turn.completion.request_id
        return None

    def _forget_answers(self, *, replays: bool) -> None:
        self._num_like.clear()
        self.num_asked = self.num_replayed = 0
        self._turns = [replace(turn, is_seen=False, branch_reward=None) for turn in self._turns]
        self.unreplayed = list(range(len(self._turns))) if replays else []
        self.is_amended = self.is_amended or bool(self._turns)

    def _count_like(self, observation: Observation) -> tuple[str, int]:
        """Return the prompt's digest, and the number of requests with it, including this one."""
        images = "".join(one.digest for one in observation.images).encode()
        prompt = array("q", observation.prompt_token_ids).tobytes()
        digest = blake2b(prompt + images, digest_size=16).hexdigest()
        self._num_like[digest] += 1
        return digest, self._num_like[digest]


def _options_digest(sampling: SamplingParams) -> str:
    """Return a digest of the options that affect an answer, besides prompt, budget and seed."""
    stops = sorted(sampling.stop), sorted(sampling.stop_token_ids)
    constraints = sorted(map(repr, sampling.engine_options.items()))
    options = repr((*stops, constraints, sampling.num_logprobs))
    return blake2b(options.encode(), digest_size=8).hexdigest()


def _answers(turn: Turn, request: GenerationRequest) -> bool:
    """Whether the turn's completion could be the request's answer."""
    num_tokens, budget = len(turn.completion.token_ids), request.sampling.max_tokens
    was_cut = turn.completion.finish_reason is FinishReason.LENGTH
    fits = num_tokens == budget if was_cut else num_tokens <= budget
    asked = turn.prompt_token_ids, turn.images
    return fits and asked == (request.prompt_token_ids, request.images)


class TreeEnv(Protocol):
    """An environment that requests completions itself, possibly several concurrently.

    Its turns form a tree: each prompt extends an earlier turn, or begins another branch. Otherwise
    it is like a `TokenEnv`, with `run` instead of `reset` and `step`. A resumed run continues it if
    it ``replays``: repeated requests are answered from the record.
    """

    async def run(self, turns: TurnTree, /) -> Terminal:
        """Request completions until the rollout ends. When a limit is reached, this call is
        cancelled, and then `finish` is called."""

    async def finish(self, status: RolloutStatus, /) -> Terminal: ...

    async def close(self) -> None: ...


RolloutEnv = TokenEnv | TreeEnv


def is_tree_env(env: object) -> TypeGuard[TreeEnv]:
    return hasattr(env, "run") and not hasattr(env, "step")
