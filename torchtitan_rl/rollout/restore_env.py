"""Brings a fresh environment to where a recorded rollout was.

By its own state where there is one; else, where the environment declares that replaying rebuilds
it, by reset and stepping with the recorded completions, each prompt compared with the recorded
one; a rollout that had no finished turn is brought back by reset, compared likewise. Anything else
is a `NotResumableError`, an environment that fails on the way included.
"""

from __future__ import annotations

import json
from typing import Any

from torchtitan_rl.rollout.env import Observation, Stateful, Terminal, TokenEnv
from torchtitan_rl.rollout.env_calls import EnvCalls, RolloutEnded
from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.types import RolloutStatus


class NotResumableError(Exception):
    """The environment cannot be brought back; the rollout has to begin anew."""


async def restore_env(env: TokenEnv, recorded: RecordedRollout, calls: EnvCalls) -> Observation:
    """The observation behind the recorded turns; ``env`` is fresh, nothing was called yet.

    Raises:
        NotResumableError: the environment cannot take part, failed, or came out elsewhere.
    """
    try:
        saved = recorded.env_state
        if saved is not None and isinstance(env, Stateful):
            await calls(env.load_state_dict, saved.state)
            answer = saved.answer
        else:
            answer = await _replay(env, recorded, calls)
    except RolloutEnded as error:
        raise NotResumableError(error.cause) from error
    return _require_prompt(answer, recorded.prompt_token_ids, len(recorded.turns))


async def state_of(env: TokenEnv, calls: EnvCalls) -> Any:
    """A copy of the environment's state; None where it has none.

    Raises:
        RolloutEnded: it cannot be had, or is not JSON-able.
    """
    if not isinstance(env, Stateful):
        return None
    state = await calls(env.state_dict)
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError, RecursionError) as error:
        cause = f"the environment owes a JSON-able state_dict: {error}"
        raise RolloutEnded(RolloutStatus.ENV_ERROR, cause) from error


async def _replay(
    env: TokenEnv, recorded: RecordedRollout, calls: EnvCalls
) -> Observation | Terminal:
    if recorded.turns and not getattr(env, "replays", False):
        raise NotResumableError("it has no saved state and does not declare that it replays")
    answer: Observation | Terminal = await calls.reset(env)
    for index, turn in enumerate(recorded.turns):
        _require_prompt(answer, turn.prompt_token_ids, index)
        answer = await calls.step(env, turn.completion)
    return answer


def _require_prompt(
    answer: Observation | Terminal, prompt: tuple[int, ...] | None, turn: int
) -> Observation:
    if isinstance(answer, Terminal):
        raise NotResumableError(f"replaying ended before turn {turn}")
    if prompt is not None and answer.prompt_token_ids != prompt:
        raise NotResumableError(f"replaying gave another prompt of turn {turn}")
    return answer
