"""The record of a running rollout, from which another process can continue it. Pure.

Invariants: recorded turns are whole (sampled, and answered by the environment) and are never
sampled again; they are a prefix of the rollout, so that dropping one drops all later ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.types import Completion, Rollout, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvState:
    """An environment between two turns, with its last answer.

    ``state`` is what its `state_dict` returned; None without one (then only a `Terminal` is
    recorded). ``messages`` are the conversation, recorded only with a `Terminal`.
    """

    answer: Observation | Terminal
    state: Any = None  # JSON-able
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """One rollout so far.

    ``env_states[n]`` is the environment after the first ``n`` turns; any may be missing.
    ``partial`` belongs to the turn that was running, whose prompt is ``prompt_token_ids``: partial
    tokens if its finish reason is ABORT, else a whole completion that the environment has not
    answered. ``ended`` is the rollout before scoring, if it is over.
    """

    rollout_id: str
    turns: tuple[Turn, ...] = ()
    env_states: Mapping[int, EnvState] = field(default_factory=dict)
    partial: Completion | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    ended: Rollout | None = None

    @property
    def env_state(self) -> EnvState | None:
        """The environment after the last recorded turn."""
        return self.env_states.get(len(self.turns))

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, those of the running turn included."""
        in_turns = sum(len(turn.completion.token_ids) for turn in self.turns)
        return in_turns + (len(self.partial.token_ids) if self.partial else 0)


def with_turn(
    recorded: RecordedRollout, index: int, turn: Turn, env_state: EnvState | None
) -> RecordedRollout:
    """The record with ``turn`` at ``index``, which replaces that turn and all later ones.

    A last turn that is already there is kept, and gets ``env_state``.

    Raises:
        ValueError: turns before this one are missing.
    """
    if index > len(recorded.turns):
        raise ValueError(
            f"rollout {recorded.rollout_id}: turn {index} follows turn {len(recorded.turns) - 1}"
        )
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
    """What a trainer restored at ``restored_version`` may use, and how many tokens it may not.

    The longest prefix of turns whose tokens all have versions from ``admitted_version`` (of the
    group) to ``restored_version``; the tokens of a running turn are kept or dropped together.
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
