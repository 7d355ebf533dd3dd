"""The record of a running rollout, from which another process can continue the rollout; and the
encoding of rollouts as bytes (msgpack), for the journal and for checkpoints. No I/O and no state.

Invariants
- Recorded turns are complete (sampled, and answered by the environment) and are never sampled
  again. They are a prefix of the rollout: if a turn is dropped, all later turns are dropped too.
- Values are read exactly as they were written: floats to the last bit (NaN and Infinity included),
  bytes, enums.

Where a prompt extends the previous turn, -1 is written in place of that turn's tokens, and its
images are left out, so that a long conversation takes linear space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import takewhile
from typing import Any, TypeVar

import msgspec

from torchtitan_rl.images import PromptImage, images_before
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.types import Completion, Problem, Rollout, RolloutGroup, Turn

_Prompted = TypeVar("_Prompted", Turn, Observation, "RecordedRollout")

_EXTENDS = -1
_MAX_INT_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvState:
    """The state of an environment between two turns, with its last answer: an ``observation`` or a
    ``terminal``; the conversation ``messages`` is recorded only with the latter.

    ``state`` is the result of `state_dict` as JSON, which has integers of any size; None if there
    is no `state_dict`: then only a `Terminal` is recorded.
    """

    observation: Observation | None = None
    terminal: Terminal | None = None
    state: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """One rollout so far.

    ``env_states[n]`` is the environment's state after the first ``n`` turns; any may be missing.
    ``partial`` is the completion of the running turn, whose prompt is ``prompt_token_ids`` with
    ``images``: partial tokens with the finish reason ABORT, otherwise a whole completion that the
    environment has not answered. ``ended`` is the rollout before scoring, once it has ended.
    """

    rollout_id: str
    turns: tuple[Turn, ...] = ()
    env_states: Mapping[int, EnvState] = field(default_factory=dict)
    partial: Completion | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    images: tuple[PromptImage, ...] = ()
    ended: Rollout | None = None

    @property
    def env_state(self) -> EnvState | None:
        return self.env_states.get(len(self.turns))

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens, including the running turn's."""
        in_turns = sum(len(turn.completion.token_ids) for turn in self.turns)
        return in_turns + (len(self.partial.token_ids) if self.partial else 0)


SavedRollout = tuple[RecordedRollout, tuple[tuple[int, EnvState], ...]]
"""A `RecordedRollout` in written form: with short prompts, and its states in a separate tuple,
because msgpack keys are written as texts."""


def to_bytes(value: object) -> bytes:
    """Encode dataclasses as msgpack. Other numbers of user code become Python numbers, and other
    objects their ``repr``."""
    try:
        return _ENCODER.encode(value)
    except (OverflowError, TypeError, UnicodeEncodeError):
        # an integer of more than 64 bits, a strange key, a lone surrogate
        builtins = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_plain_type)
        return _ENCODER.encode(_storable(builtins))


def turn_to_bytes(turn: Turn, previous: Turn | None, env_state: EnvState | None) -> bytes:
    """Encode a turn, with the environment's state after the turn."""
    saved = None if env_state is None else _with_prompt(env_state, turn, _short)
    return to_bytes((_short(turn, previous), saved))


def turn_from_bytes(data: bytes, previous: Turn | None) -> tuple[Turn, EnvState | None]:
    """Decode the result of `turn_to_bytes`; ``previous`` is the turn before.

    Raises:
        msgspec.DecodeError: another version wrote ``data``.
        ValueError: the prompt extends a turn, and ``previous`` is None.
    """
    short, saved = _TURN.decode(data)
    turn = _whole(short, previous)
    return turn, None if saved is None else _with_prompt(saved, turn, _whole)


def completion_in(data: bytes) -> Completion:
    return _TURN.decode(data)[0].completion


def short_group(group: RolloutGroup) -> RolloutGroup:
    """Shorten the group's prompts for writing."""
    return replace(group, rollouts=tuple(map(_short_rollout, group.rollouts)))


def whole_group(group: RolloutGroup) -> RolloutGroup:
    """Undo `short_group`."""
    rollouts = (replace(one, turns=_whole_turns(one.turns)) for one in group.rollouts)
    return replace(group, rollouts=tuple(rollouts))


def saved_rollout(recorded: RecordedRollout) -> SavedRollout:
    turns, ended = recorded.turns, recorded.ended
    before = (None, *turns)  # entry n is the turn before `env_states[n]`
    short = replace(
        _short(recorded, before[-1]),
        turns=_short_turns(turns),
        env_states={},
        ended=None if ended is None else _short_rollout(replace(ended, turns=())),
    )
    states = recorded.env_states.items()
    return short, tuple((n, _with_prompt(state, before[n], _short)) for n, state in states)


def restored_rollout(saved: SavedRollout) -> RecordedRollout:
    """Undo `saved_rollout`."""
    short, states = saved
    turns = _whole_turns(short.turns)
    before, ended = (None, *turns), short.ended
    return replace(
        _whole(short, before[-1]),
        turns=turns,
        env_states={n: _with_prompt(state, before[n], _whole) for n, state in states},
        ended=None if ended is None else replace(ended, turns=turns),
    )


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """Convert a problem to JSON types, for agents."""
    part = {"task": problem.task} if problem.task else {}
    return {"problem_id": problem.problem_id, "data": plain(problem.data), **part}


def plain(value: Any) -> Any:
    """Return a copy in JSON types: tuples become lists, keys become strings, and objects of other
    types become their ``repr``."""
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value)


def _short(value: _Prompted, previous: Turn | None) -> _Prompted:
    new = _new_part(value.prompt_token_ids, value.images, previous)
    return value if new is None else replace(value, prompt_token_ids=new[0], images=new[1])


def _new_part(
    prompt: tuple[int, ...] | None, images: tuple[PromptImage, ...], previous: Turn | None
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]] | None:
    """Return what a prompt adds to the previous turn; None if it does not extend that turn."""
    if previous is None or prompt is None:
        return None
    before, seen = previous.token_ids, previous.images
    if prompt[: len(before)] != before or images_before(images, len(before)) != seen:
        return None
    return (_EXTENDS, *prompt[len(before) :]), images[len(seen) :]


def _whole(value: _Prompted, previous: Turn | None) -> _Prompted:
    prompt: tuple[int, ...] | None = value.prompt_token_ids
    if prompt is None or prompt[:1] != (_EXTENDS,):
        return value
    if previous is None:
        raise ValueError("the prompt extends a turn that is not there")
    images: tuple[PromptImage, ...] = previous.images + value.images
    return replace(value, prompt_token_ids=previous.token_ids + prompt[1:], images=images)


def _short_turns(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    return tuple(map(_short, turns, (None, *turns)))


def _whole_turns(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    whole: list[Turn] = []
    for turn in turns:
        whole.append(_whole(turn, whole[-1] if whole else None))
    return tuple(whole)


def _short_rollout(rollout: Rollout) -> Rollout:
    # A rubric's components may be bools, which a decoder does not accept as numbers.
    metrics = {str(name): float(value) for name, value in rollout.metrics.items()}
    reward = None if rollout.reward is None else float(rollout.reward)
    return replace(rollout, turns=_short_turns(rollout.turns), metrics=metrics, reward=reward)


def _with_prompt(
    state: EnvState,
    turn: Turn | None,
    convert: Callable[[Observation, Turn | None], Observation],
) -> EnvState:
    """Convert the prompt after ``turn``, which is None for the state after `reset`."""
    if (observation := state.observation) is None:
        return state
    return replace(state, observation=convert(observation, turn))


def _plain_type(value: object) -> object:
    for plain_type in (bool, int, float, str):
        if isinstance(value, plain_type):
            return plain_type(value)
    return dict(value) if isinstance(value, Mapping) else repr(value)


def _storable(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case int() if value.bit_length() > _MAX_INT_BITS:
            return str(value)
        case dict():
            return {_storable(str(key)): _storable(item) for key, item in value.items()}
        case list() | tuple():
            return [_storable(item) for item in value]
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain_type)
_TURN = msgspec.msgpack.Decoder(tuple[Turn, EnvState | None])


def with_turn(
    recorded: RecordedRollout, index: int, turn: Turn, env_state: EnvState | None
) -> RecordedRollout:
    """Return the record with ``turn`` at ``index``, in place of all later turns. If ``turn`` is the
    last one already, only ``env_state`` is added. Raises ValueError: turns before ``index`` are
    missing."""
    if index > len(recorded.turns):
        last = len(recorded.turns) - 1
        raise ValueError(f"rollout {recorded.rollout_id}: turn {index} follows turn {last}")
    kept = recorded
    if recorded.turns[index:] != (turn,):
        kept = _first_turns(recorded, index)
        kept = replace(kept, turns=(*kept.turns, turn))
    if env_state is None:
        return kept
    return replace(kept, env_states={**kept.env_states, index + 1: env_state})


def usable_turns(
    recorded: RecordedRollout, *, restored_version: int, admitted_version: int
) -> tuple[RecordedRollout, int]:
    """Return the part of the record that a trainer restored at ``restored_version`` may use, and
    the number of tokens dropped.

    The part is the longest prefix of turns whose tokens all have versions from ``admitted_version``
    (of the group) to ``restored_version``; a running turn is used as a whole or not at all.
    """

    def usable(completion: Completion) -> bool:
        return all(admitted_version <= v <= restored_version for v in completion.versions)

    kept = recorded
    count = len(list(takewhile(lambda turn: usable(turn.completion), recorded.turns)))
    if count < len(recorded.turns):
        kept = _first_turns(recorded, count)
    elif recorded.partial is not None and not usable(recorded.partial):
        kept = replace(recorded, partial=None)
    return kept, recorded.num_tokens - kept.num_tokens


def _first_turns(recorded: RecordedRollout, count: int) -> RecordedRollout:
    return RecordedRollout(
        rollout_id=recorded.rollout_id,
        turns=recorded.turns[:count],
        env_states={n: state for n, state in recorded.env_states.items() if n <= count},
    )
