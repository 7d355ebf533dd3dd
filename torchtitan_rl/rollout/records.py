"""JSON forms of problems, turns, rollouts, groups and of rollouts that are still running. Pure.

``X_to_json`` gives a dict of JSON's types that shares nothing mutable with ``x``, ``X_from_json``
makes an equal ``x`` of it, after `json.dumps` and `json.loads` too: floats come back bit for bit
(Python writes their shortest exact digits, and NaN and Infinity by name). What an environment put
into messages that is not JSON-able becomes its ``repr``.

A prompt that begins with the previous turn's prompt and completion is written as what is new, so
that a long conversation takes linear space. Tokens and logprobs are packed (`packed.py`); format 1
had lists of them, and is still read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.packed import pack_floats, pack_ints, unpack_floats, unpack_ints
from torchtitan_rl.rollout.recorded import EnvState, RecordedRollout
from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    FinishReason,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Turn,
    VersionRun,
)

Json = dict[str, Any]

FORMAT = 2  # of all forms here; written into groups and recorded rollouts
_READ_FORMATS = (1, FORMAT)


def problem_to_json(problem: Problem) -> Json:
    return {"problem_id": problem.problem_id, "data": plain(problem.data)}


def problem_from_json(data: Json) -> Problem:
    return Problem(problem_id=data["problem_id"], data=data["data"])


def completion_to_json(completion: Completion) -> Json:
    return {
        "request_id": completion.request_id,
        "token_ids": pack_ints(completion.token_ids),
        "logprobs": pack_floats(completion.logprobs),
        "version_runs": [[run.start, run.version] for run in completion.version_runs],
        "finish_reason": completion.finish_reason.value,
        "metrics": None if completion.metrics is None else asdict(completion.metrics),
        "replica": completion.replica,
        "stop_reason": completion.stop_reason,
        "top_logprobs": [[list(pair) for pair in pairs] for pairs in completion.top_logprobs],
    }


def completion_from_json(data: Json) -> Completion:
    return Completion(
        request_id=data["request_id"],
        token_ids=unpack_ints(data["token_ids"]),
        logprobs=unpack_floats(data["logprobs"]),
        version_runs=tuple(VersionRun(start, version) for start, version in data["version_runs"]),
        finish_reason=FinishReason(data["finish_reason"]),
        metrics=None if data["metrics"] is None else CompletionMetrics(**data["metrics"]),
        replica=data["replica"],
        stop_reason=data.get("stop_reason"),
        top_logprobs=tuple(
            tuple((token_id, logprob) for token_id, logprob in pairs)
            for pairs in data.get("top_logprobs", ())
        ),
    )


def turn_to_json(turn: Turn, previous: Turn | None = None, *, num_known: int = 0) -> Json:
    """``previous`` is the turn before this one, and has to be given again when reading.

    Whoever has not kept it may say instead that the prompt begins with its ``num_known`` tokens,
    prompt and completion.
    """
    prompt = turn.prompt_token_ids
    return {
        "prompt": _extension_to_json(prompt, num_known)
        if num_known
        else _prompt_to_json(prompt, previous),
        "completion": completion_to_json(turn.completion),
        "reward": turn.reward,
        "text": turn.text,
        "is_seen": turn.is_seen,
    }


def turn_from_json(data: Json, previous: Turn | None = None) -> Turn:
    return Turn(
        prompt_token_ids=_prompt_from_json(data["prompt"], previous),
        completion=completion_from_json(data["completion"]),
        reward=data["reward"],
        text=data["text"],
        is_seen=data.get("is_seen", True),
    )


def turns_to_json(turns: Sequence[Turn]) -> list[Json]:
    before = (None, *turns)
    return [turn_to_json(turn, previous) for turn, previous in zip(turns, before, strict=False)]


def turns_from_json(data: Sequence[Json]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for item in data:
        turns.append(turn_from_json(item, turns[-1] if turns else None))
    return tuple(turns)


def rollout_to_json(rollout: Rollout) -> Json:
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "problem_id": rollout.problem_id,
        "turns": turns_to_json(rollout.turns),
        "status": rollout.status.value,
        "reward": rollout.reward,
        "cause": rollout.cause,
        "messages": plain(rollout.messages),
        "metrics": plain(rollout.metrics),
    }


def rollout_from_json(data: Json) -> Rollout:
    return Rollout(
        rollout_id=data["rollout_id"],
        group_id=data["group_id"],
        problem_id=data["problem_id"],
        turns=turns_from_json(data["turns"]),
        status=RolloutStatus(data["status"]),
        reward=data["reward"],
        cause=data["cause"],
        messages=tuple(data["messages"]),
        metrics=data["metrics"],
    )


def group_to_json(group: RolloutGroup) -> Json:
    return {
        "format": FORMAT,
        "group_id": group.group_id,
        "problem": problem_to_json(group.problem),
        "rollouts": [rollout_to_json(rollout) for rollout in group.rollouts],
    }


def group_from_json(data: Json) -> RolloutGroup:
    """Raises ValueError where another version of this module wrote ``data``."""
    require_format(data)
    return RolloutGroup(
        group_id=data["group_id"],
        problem=problem_from_json(data["problem"]),
        rollouts=tuple(rollout_from_json(rollout) for rollout in data["rollouts"]),
    )


def recorded_to_json(recorded: RecordedRollout) -> Json:
    turns, ended = recorded.turns, recorded.ended
    last = turns[-1] if turns else None
    prompt = recorded.prompt_token_ids
    return {
        "format": FORMAT,
        "rollout_id": recorded.rollout_id,
        "turns": turns_to_json(turns),
        "env_states": {
            str(n): env_state_to_json(state, turns[n - 1] if n else None)
            for n, state in recorded.env_states.items()
        },
        "partial": None if recorded.partial is None else completion_to_json(recorded.partial),
        "prompt": None if prompt is None else _prompt_to_json(prompt, last),
        "ended": None if ended is None else rollout_to_json(replace(ended, turns=())),
    }


def recorded_from_json(data: Json) -> RecordedRollout:
    """Raises ValueError where another version of this module wrote ``data``."""
    require_format(data)
    turns = turns_from_json(data["turns"])
    ended = None if data["ended"] is None else rollout_from_json(data["ended"])
    partial, prompt = data["partial"], data["prompt"]
    last = turns[-1] if turns else None
    return RecordedRollout(
        rollout_id=data["rollout_id"],
        turns=turns,
        env_states={
            int(n): env_state_from_json(state, turns[int(n) - 1] if int(n) else None)
            for n, state in data["env_states"].items()
        },
        partial=None if partial is None else completion_from_json(partial),
        prompt_token_ids=None if prompt is None else _prompt_from_json(prompt, last),
        ended=None if ended is None else replace(ended, turns=turns),
    )


def env_state_to_json(env_state: EnvState, turn: Turn | None) -> Json:
    """``turn`` is the one that this is the state behind, None after `reset`."""
    answer = env_state.answer
    fields: Json
    if isinstance(answer, Observation):
        fields = {
            "kind": "observation",
            "prompt": _prompt_to_json(answer.prompt_token_ids, turn),
            "max_tokens": answer.max_tokens,
            "stop_token_ids": list(answer.stop_token_ids),
            "stop": list(answer.stop),
            "num_logprobs": answer.num_logprobs,
        }
    else:
        fields = {
            "kind": "terminal",
            "reward": answer.reward,
            "status": answer.status.value,
            "metrics": plain(answer.metrics),
        }
    fields |= {
        "turn_reward": answer.turn_reward,
        "turn_text": answer.turn_text,
        "turn_is_seen": answer.turn_is_seen,
    }
    return {
        "answer": fields,
        "state": plain(env_state.state),
        "messages": plain(env_state.messages),
    }


def env_state_from_json(data: Json, turn: Turn | None) -> EnvState:
    fields = data["answer"]
    said = {
        "turn_reward": fields["turn_reward"],
        "turn_text": fields["turn_text"],
        "turn_is_seen": fields.get("turn_is_seen", True),
    }
    answer: Observation | Terminal
    if fields["kind"] == "observation":
        answer = Observation(
            prompt_token_ids=_prompt_from_json(fields["prompt"], turn),
            max_tokens=fields["max_tokens"],
            stop_token_ids=tuple(fields["stop_token_ids"]),
            stop=tuple(fields.get("stop", ())),
            num_logprobs=fields.get("num_logprobs", 0),
            **said,
        )
    else:
        answer = Terminal(
            reward=fields["reward"],
            status=RolloutStatus(fields["status"]),
            metrics=fields["metrics"],
            **said,
        )
    return EnvState(answer=answer, state=data["state"], messages=tuple(data["messages"]))


def plain(value: Any) -> Any:
    """A copy in JSON's types: tuples become lists, keys strings, what does not fit its repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value)


def require_format(data: Json) -> None:
    if data.get("format") not in _READ_FORMATS:
        raise ValueError(f"a record of format {data.get('format')!r}; this version reads {FORMAT}")


def _prompt_to_json(prompt: tuple[int, ...], previous: Turn | None) -> Json:
    if previous is not None:
        before = previous.prompt_token_ids + previous.completion.token_ids
        if prompt[: len(before)] == before:
            return _extension_to_json(prompt, len(before))
    return {"extends": False, "token_ids": pack_ints(prompt)}


def _extension_to_json(prompt: tuple[int, ...], num_known: int) -> Json:
    return {"extends": True, "token_ids": pack_ints(prompt[num_known:])}


def _prompt_from_json(data: Json, previous: Turn | None) -> tuple[int, ...]:
    """Raises ValueError where the previous turn is needed and missing."""
    token_ids = unpack_ints(data["token_ids"])
    if not data["extends"]:
        return token_ids
    if previous is None:
        raise ValueError("the prompt extends a turn that is not there")
    return previous.prompt_token_ids + previous.completion.token_ids + token_ids
