"""Calls the environment of one rollout: each call has a time limit, and each answer is checked.

Invariants: an error of the environment (an exception, a call that takes too long, an answer of a
wrong type) becomes a `RolloutEnded` with a status and a cause. `close` runs to its end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torchtitan_rl.aio import cancel_all, uninterrupted
from torchtitan_rl.images import PromptImage
from torchtitan_rl.rollout.calls import (
    CallFailedError,
    CallTimeoutError,
    abandoned,
    summary,
    within,
)
from torchtitan_rl.rollout.env import (
    Observation,
    Terminal,
    WrongAnswerError,
    checked_answer,
    checked_terminal,
    is_stateful,
    replays,
    require_async,
)
from torchtitan_rl.rollout.records import RecordedRollout, plain
from torchtitan_rl.rollout.tree import RolloutEnded, RolloutEnv, TurnTree, is_tree_env
from torchtitan_rl.types import Completion, RolloutStatus

_A = TypeVar("_A")


class NotResumableError(Exception):
    """The environment cannot be restored; the rollout has to start again."""


class EnvSession:
    """The environment of one rollout. ``on_call`` is called with the name of each method before its
    call.

    All methods but `close` and `messages` raise `RolloutEnded`, and `HangingCallsError` if too many
    abandoned calls hang.
    """

    def __init__(
        self,
        make: Callable[[], RolloutEnv],
        *,
        timeout_s: float,
        max_prompt_tokens: int,
        on_call: Callable[[str], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._max_prompt_tokens = max_prompt_tokens
        self._on_call = on_call
        try:  # without a time-out, which could leave a half-created environment
            self._env = make()
            require_async(self._env)
            self._is_stateful = is_stateful(self._env)
        except Exception as error:
            raise RolloutEnded(RolloutStatus.ENV_ERROR, f"creation: {summary(error)}") from error

    @property
    def is_tree(self) -> bool:
        return is_tree_env(self._env)

    async def run(self, turns: TurnTree) -> Terminal | None:
        """Run a `TreeEnv` to its end. Returns None if a limit was reached first."""
        assert is_tree_env(self._env)
        abandoned.require_few()
        work = asyncio.ensure_future(within(None, self._env.run, turns))
        try:
            await turns.watch(work)
            return None if turns.limit else _converted("agent", checked_terminal, work.result())
        except CallFailedError as error:
            raise RolloutEnded(RolloutStatus.ENV_ERROR, f"agent: {error}") from error
        finally:
            await uninterrupted(cancel_all([work]))

    async def reset(self) -> Observation:
        answer = await self._answer("reset")
        if isinstance(answer, Terminal):
            cause = "reset: expected an Observation, got a Terminal"
            raise RolloutEnded(RolloutStatus.ENV_ERROR, cause)
        return answer

    async def step(self, completion: Completion) -> Observation | Terminal:
        return await self._answer("step", completion)

    async def finish(self, status: RolloutStatus) -> Terminal:
        return _converted("finish", checked_terminal, await self._call("finish", status))

    async def state(self) -> str | None:
        """The environment's state, as JSON; None without one."""
        if not self._is_stateful:
            return None
        state = await self._call("state_dict")
        try:
            return None if state is None else json.dumps(state)
        except (TypeError, ValueError, RecursionError) as error:
            cause = f"state_dict: expected JSON-able data: {error}"
            raise RolloutEnded(RolloutStatus.ENV_ERROR, cause) from error

    async def restore(self, recorded: RecordedRollout) -> Observation:
        """Continue a recorded rollout, instead of `reset`. Returns the next observation.

        The environment loads its recorded state, or else is reset and stepped with the recorded
        completions, which needs an environment that replays. Each prompt must equal the recorded
        one. Raises NotResumableError: there is no state and the environment does not replay, the
        environment failed, or a prompt differs.
        """
        saved = recorded.env_state
        try:
            if saved is not None and saved.observation and saved.state and self._is_stateful:
                await self._call("load_state_dict", json.loads(saved.state))
                answer: Observation | Terminal = saved.observation
            else:
                answer = await self._replay(recorded)
        except RolloutEnded as error:
            raise NotResumableError(error.cause) from error
        prompt, images = recorded.prompt_token_ids, recorded.images
        return _require_prompt(answer, prompt, images, len(recorded.turns))

    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """Return a JSON copy of the conversation; empty if the environment has none.

        Raises:
            TypeError: a message is not a mapping.
            Exception: the environment raised it.
        """
        messages = tuple(getattr(self._env, "messages", ()))
        if not all(isinstance(message, Mapping) for message in messages):
            raise TypeError("not all messages are mappings")
        return tuple(plain(message) for message in messages)

    async def close(self) -> str | None:
        """Close the environment, even if this call is cancelled, within the time-out. Returns the
        error, or None."""
        try:
            await uninterrupted(self._call("close"))
        except RolloutEnded as error:
            return error.cause
        return None

    def require_replayable(self, recorded: RecordedRollout) -> None:
        """Raise NotResumableError if there are recorded turns that cannot be replayed."""
        if recorded.turns and not replays(self._env):
            raise NotResumableError("it has no saved state and does not declare `replays`")

    async def _replay(self, recorded: RecordedRollout) -> Observation | Terminal:
        self.require_replayable(recorded)
        answer: Observation | Terminal = await self.reset()
        for index, turn in enumerate(recorded.turns):
            _require_prompt(answer, turn.prompt_token_ids, turn.images, index)
            answer = await self.step(turn.completion)
        return answer

    async def _answer(self, name: str, *args: Any) -> Observation | Terminal:
        answer = await self._call(name, *args)
        return _converted(name, checked_answer, answer, self._max_prompt_tokens)

    async def _call(self, name: str, *args: Any) -> Any:
        if name != "close":
            abandoned.require_few()
        self._on_call(name)
        try:
            return await within(self._timeout_s, getattr(self._env, name), *args)
        except CallTimeoutError as error:
            raise RolloutEnded(RolloutStatus.STEP_TIMEOUT, f"{name}: {error}") from error
        except CallFailedError as error:
            raise RolloutEnded(RolloutStatus.ENV_ERROR, f"{name}: {error}") from error


def _converted(name: str, check: Callable[..., _A], *args: Any) -> _A:
    try:
        return check(*args)
    except WrongAnswerError as error:
        raise RolloutEnded(RolloutStatus.ENV_ERROR, f"{name}: {error}") from error
    except Exception as error:  # raised by the user's objects, for example by __float__
        raise RolloutEnded(RolloutStatus.ENV_ERROR, f"{name}: {summary(error)}") from error


def _require_prompt(
    answer: Observation | Terminal,
    prompt: tuple[int, ...] | None,
    images: tuple[PromptImage, ...],
    turn: int,
) -> Observation:
    if isinstance(answer, Terminal):
        raise NotResumableError(f"the replayed environment ended before turn {turn}")
    if prompt is not None and (answer.prompt_token_ids, answer.images) != (prompt, images):
        raise NotResumableError(f"the replayed environment has another prompt in turn {turn}")
    return answer
