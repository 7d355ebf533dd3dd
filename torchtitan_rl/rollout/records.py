"""JSON forms of problems, turns, rollouts, groups, and of rollouts that are still running. Pure.

``X_to_json`` gives a dict of JSON's types that shares nothing mutable with ``x``; ``X_from_json``
makes an equal ``x`` of it, also after `json.dumps` and `json.loads`. Floats are equal to the last
bit (NaN and Infinity included). What an environment put into messages and is not JSON-able becomes
its ``repr``.

A prompt that begins with the previous turn's prompt and completion is written without them, so that
a long conversation takes linear space. Token ids and logprobs are strings: base64 of little-endian
32-bit integers and 64-bit floats, which takes a tenth of the time of JSON's digits; kept tokens are
base64 too.
"""

from __future__ import annotations

import binascii
import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from enum import StrEnum
from typing import Any, Literal

from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.recorded import EnvState, RecordedRollout
from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    FinishReason,
    Grammar,
    KeptRun,
    KeptTokens,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Turn,
    VersionRun,
)

Json = dict[str, Any]

FORMAT = 3  # of all forms here; written into groups and recorded rollouts


def problem_to_json(problem: Problem) -> Json:
    part = {"task": problem.task} if problem.task else {}
    return {"problem_id": problem.problem_id, "data": plain(problem.data), **part}


def problem_from_json(data: Json) -> Problem:
    return Problem(problem_id=data["problem_id"], data=data["data"], task=data.get("task", ""))


def completion_to_json(completion: Completion) -> Json:
    return {
        "token_ids": pack_ints(completion.token_ids),
        "logprobs": _pack(array("d", completion.logprobs)),
        "kept_tokens": [[start, _kept_to_json(kept)] for start, kept in completion.kept_tokens],
        **_plain_fields(completion, without=("token_ids", "logprobs", "kept_tokens")),
    }


def completion_from_json(data: Json) -> Completion:
    parsed = {
        "token_ids": unpack_ints(data["token_ids"]),
        "logprobs": _unpack(data["logprobs"], "d"),
        "version_runs": tuple(VersionRun(*run) for run in data["version_runs"]),
        "finish_reason": FinishReason(data["finish_reason"]),
        "metrics": None if data["metrics"] is None else CompletionMetrics(**data["metrics"]),
        "top_logprobs": tuple(
            tuple((token_id, logprob) for token_id, logprob in pairs)
            for pairs in data["top_logprobs"]
        ),
        "kept_tokens": tuple(
            KeptRun(start, _kept_from_json(kept)) for start, kept in data["kept_tokens"]
        ),
    }
    return Completion(**data | parsed)


def turn_to_json(turn: Turn, previous: Turn | None = None) -> Json:
    """``previous`` is the turn before this one, which `turn_from_json` needs again."""
    return {
        "prompt": _prompt_to_json(turn.prompt_token_ids, previous),
        "completion": completion_to_json(turn.completion),
        **_plain_fields(turn, without=("prompt_token_ids", "completion")),
    }


def turn_from_json(data: Json, previous: Turn | None = None) -> Turn:
    return Turn(
        prompt_token_ids=_prompt_from_json(data["prompt"], previous),
        completion=completion_from_json(data["completion"]),
        reward=data["reward"],
        text=data["text"],
        is_seen=data["is_seen"],
        branch_reward=data["branch_reward"],
        request_key=data["request_key"],
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
    turns = turns_to_json(rollout.turns)
    return {"turns": turns, **_plain_fields(rollout, without=("turns",))}


def rollout_from_json(data: Json) -> Rollout:
    parsed = {
        "turns": turns_from_json(data["turns"]),
        "status": RolloutStatus(data["status"]),
        "messages": tuple(data["messages"]),
    }
    return Rollout(**data | parsed)


def group_to_json(group: RolloutGroup) -> Json:
    return {
        "format": FORMAT,
        "group_id": group.group_id,
        "problem": problem_to_json(group.problem),
        "rollouts": [rollout_to_json(rollout) for rollout in group.rollouts],
    }


def group_from_json(data: Json) -> RolloutGroup:
    """Raises ValueError if another version of this module wrote ``data``."""
    require_format(data)
    return RolloutGroup(
        group_id=data["group_id"],
        problem=problem_from_json(data["problem"]),
        rollouts=tuple(rollout_from_json(rollout) for rollout in data["rollouts"]),
    )


def recorded_to_json(recorded: RecordedRollout) -> Json:
    turns, ended, prompt = recorded.turns, recorded.ended, recorded.prompt_token_ids
    return {
        "format": FORMAT,
        "rollout_id": recorded.rollout_id,
        "turns": turns_to_json(turns),
        "env_states": {
            str(n): env_state_to_json(state, turns[n - 1] if n else None)
            for n, state in recorded.env_states.items()
        },
        "partial": None if recorded.partial is None else completion_to_json(recorded.partial),
        "prompt": None if prompt is None else _prompt_to_json(prompt, turns[-1] if turns else None),
        "ended": None if ended is None else rollout_to_json(replace(ended, turns=())),
    }


def recorded_from_json(data: Json) -> RecordedRollout:
    """Raises ValueError if another version of this module wrote ``data``."""
    require_format(data)
    turns = turns_from_json(data["turns"])
    partial, prompt, ended = data["partial"], data["prompt"], data["ended"]
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
        ended=None if ended is None else replace(rollout_from_json(ended), turns=turns),
    )


def env_state_to_json(env_state: EnvState, turn: Turn | None) -> Json:
    """The state after ``turn``, or after `reset` if that is None."""
    answer = env_state.answer
    kind: Json = {"kind": "terminal"}
    if isinstance(answer, Observation):
        kind = {"kind": "observation", "prompt": _prompt_to_json(answer.prompt_token_ids, turn)}
    return {
        "answer": kind | _plain_fields(answer, without=("prompt_token_ids",)),
        "state": plain(env_state.state),
        "messages": plain(env_state.messages),
    }


def env_state_from_json(data: Json, turn: Turn | None) -> EnvState:
    said = dict(data["answer"])
    answer: Observation | Terminal
    if said.pop("kind") == "observation":
        prompt = _prompt_from_json(said.pop("prompt"), turn)
        stops = {name: tuple(said.get(name, ())) for name in ("stop_token_ids", "stop")}
        answer = Observation(prompt_token_ids=prompt, **said | stops)
    else:
        answer = Terminal(**said | {"status": RolloutStatus(said["status"])})
    return EnvState(answer=answer, state=data["state"], messages=tuple(data["messages"]))


def plain(value: Any) -> Any:
    """A copy in JSON's types: tuples become lists, keys strings, and objects of
    any other type their repr."""
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, CompletionMetrics):
        return asdict(value)
    return repr(value)


def require_format(data: Json) -> None:
    if data.get("format") != FORMAT:
        raise ValueError(f"a record of format {data.get('format')!r}; this version reads {FORMAT}")


def pack_ints(values: Sequence[int]) -> str | list[int]:
    """A string, or a list if one of them does not fit 32 bits."""
    try:
        return _pack(array("i", values))
    except OverflowError:
        return list(values)


def unpack_ints(packed: str | Sequence[int]) -> tuple[int, ...]:
    """Raises ValueError if the string is damaged."""
    return _unpack(packed, "i")


def _pack(values: array[Any]) -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return _text(values.tobytes())


def _unpack(packed: str | Sequence[Any], typecode: Literal["i", "d"]) -> tuple[Any, ...]:
    if not isinstance(packed, str):
        return tuple(packed)
    values: array[Any] = array(typecode)
    values.frombytes(_bytes(packed))
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)


def _text(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _bytes(text: str) -> bytes:
    return binascii.a2b_base64(text, strict_mode=True)


def _kept_to_json(kept: KeptTokens) -> Json | str | None:
    if isinstance(kept, Grammar):
        return {"data": _text(kept.data), "stop_token_ids": list(kept.stop_token_ids)}
    return None if kept is None else _text(kept)


def _kept_from_json(data: Json | str | None) -> KeptTokens:
    if isinstance(data, dict):
        return Grammar(data=_bytes(data["data"]), stop_token_ids=tuple(data["stop_token_ids"]))
    return None if data is None else _bytes(data)


def _plain_fields(value: Any, *, without: Collection[str]) -> Json:
    names = (field.name for field in fields(value))
    return {name: plain(getattr(value, name)) for name in names if name not in without}


def _prompt_to_json(prompt: tuple[int, ...], previous: Turn | None) -> Json:
    if previous is not None:
        before = previous.prompt_token_ids + previous.completion.token_ids
        if prompt[: len(before)] == before:
            return {"extends": True, "token_ids": pack_ints(prompt[len(before) :])}
    return {"extends": False, "token_ids": pack_ints(prompt)}


def _prompt_from_json(data: Json, previous: Turn | None) -> tuple[int, ...]:
    """Raises ValueError if the prompt extends a turn that is missing."""
    token_ids = unpack_ints(data["token_ids"])
    if not data["extends"]:
        return token_ids
    if previous is None:
        raise ValueError("the prompt extends a turn that is not there")
    return previous.prompt_token_ids + previous.completion.token_ids + token_ids
