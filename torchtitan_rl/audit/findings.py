"""Common mistakes of environments, found in watched rollouts, and descriptions of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from textwrap import indent

from torchtitan_rl.environments.games import INVALID_ACTIONS
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.episodes import turns_by_episode
from torchtitan_rl.types import FinishReason, Problem, Rollout, RolloutStatus, Turn

_MS = 1000.0
_CONTEXT_TOKENS = 12


@dataclass(slots=True)
class EnvCall:
    """One call of an environment's method. ``blocked_s`` is the longest time for which it blocked
    the event loop."""

    method: str
    seconds: float = 0.0
    blocked_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Watched:
    """All calls of one environment. ``answers[n]`` is the environment's answer after n turns;
    ``states[n]`` is the environment's state after n turns, as JSON."""

    problem: Problem
    calls: list[EnvCall] = field(default_factory=list)
    answers: list[Observation | Terminal] = field(default_factory=list)
    states: list[str | None] = field(default_factory=list)
    is_stateful: bool = False
    replays: bool = False


class Mistake(StrEnum):
    """Kinds of findings; ``--allow`` accepts their names."""

    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    REWARD = "reward"
    NEVER_ENDS = "never-ends"
    HISTORY = "history"
    BLOCKING = "blocking"
    STATE = "state"
    PROMPT_LENGTH = "prompt-length"
    GENERATION = "generation"


_MENDS = {
    Mistake.EXCEPTION: "correct the environment: such rollouts are not trained on",
    Mistake.TIMEOUT: "give what it waits for a time limit of its own, or raise "
    "rollout.step_timeout_s",
    Mistake.REWARD: "return Terminal(reward=...), and turn_reward where a turn has one, with a "
    "finite number, or give the task a rubric; guard divisions and logarithms",
    Mistake.NEVER_ENDS: "return a Terminal from step when the problem is solved or lost; if the "
    "environment waits for another answer, --say one that it understands, or take --policy real; "
    "if the limits are the end, --allow never-ends",
    Mistake.HISTORY: "each turn is trained on as an episode of its own, with its whole prompt: "
    "return only the new messages (MessageObservation.messages), not replace_messages, or, as a "
    "TokenEnv, the previous prompt and completion followed by what is new; a template that "
    "changes earlier turns needs another renderer",
    Mistake.BLOCKING: "it stops all rollouts: wrap environments with plain methods in "
    "threaded(...), await asyncio.sleep instead of time.sleep, and move slow set-up from the "
    "creation to reset",
    Mistake.STATE: "save in state_dict all that step depends on, as JSON, and restore all of it in "
    "load_state_dict; or remove both, and rollouts start again when a run is resumed",
    Mistake.PROMPT_LENGTH: "shorten the prompt, leave such problems out, or raise "
    "rollout.max_total_tokens with generator.max_model_len and trainer.max_episode_tokens",
    Mistake.GENERATION: "see the cause; stop strings and token ids must be of the policy: encode "
    "prompts with the tokenizer that the task is given",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A mistake: ``what`` was observed in the rollout ``rollout_id``."""

    mistake: Mistake
    rollout_id: str
    what: str

    @property
    def mend(self) -> str:
        return _MENDS[self.mistake]


_FAILURES = {
    RolloutStatus.ENV_ERROR: Mistake.EXCEPTION,
    RolloutStatus.STEP_TIMEOUT: Mistake.TIMEOUT,
    RolloutStatus.ROLLOUT_TIMEOUT: Mistake.TIMEOUT,
    RolloutStatus.REWARD_ERROR: Mistake.REWARD,
    RolloutStatus.GENERATION_ERROR: Mistake.GENERATION,
}


def rollout_findings(
    rollout: Rollout,
    watched: Watched | None,
    limits: RolloutConfig,
    decode: Callable[[Sequence[int]], str],
) -> list[Finding]:
    """Find all mistakes in one rollout. A rollout that never ends is not detected here."""
    found = []

    def note(mistake: Mistake, what: str) -> None:
        found.append(Finding(mistake=mistake, rollout_id=rollout.rollout_id, what=what))

    cause = rollout.cause or ""
    if cause.startswith("state_dict"):
        note(Mistake.STATE, cause)
    elif cause:
        note(_FAILURES.get(rollout.status, Mistake.EXCEPTION), cause)
    if rollout.status is RolloutStatus.MAX_TOKENS and not rollout.turns:
        first = watched.answers[0] if watched is not None else None
        tokens = len(first.prompt_token_ids) if isinstance(first, Observation) else "too many"
        what = f"the first prompt of {tokens} tokens leaves no room in rollout.max_total_tokens"
        note(Mistake.PROMPT_LENGTH, f"{what} ({limits.max_total_tokens})")
    if len(rollout.turns) > 1 and len(turns_by_episode(rollout)) == len(rollout.turns):
        seen = (n for n, turn in enumerate(rollout.turns[:-1], start=1) if not _is_cut(turn))
        if (left := next(seen, None)) is not None:
            note(Mistake.HISTORY, _divergence(rollout.turns, left, decode))
    return found


def cut_note(rollout: Rollout, watched: Watched | None) -> str:
    """Return a note that the length limit truncated answers, which can look like an error of the
    environment; empty without any, or if only its own ``Observation.max_tokens`` did."""
    asks = watched.answers if watched is not None else ()
    limits = [one.max_tokens if isinstance(one, Observation) else None for one in asks]
    pairs = zip_longest(rollout.turns, limits[: len(rollout.turns)])
    cut = [one for one, most in pairs if _is_cut(one) and len(one.completion.token_ids) != most]
    if not cut:
        return ""
    return (
        f"{rollout.rollout_id}: {len(cut)} of {len(rollout.turns)} answers were cut, the first one "
        f"after {len(cut[0].completion.token_ids)} tokens, so the environment did not see their "
        "ends, and the next prompt may not extend them: raise rollout.sampling.max_tokens_per_turn "
        "or rollout.max_total_tokens if answers are meant to be so long"
    )


def says_nothing_of_the_end(rollout: Rollout) -> str:
    """Explain why the environment is not to blame for a rollout that did not end, or nothing."""
    turns = rollout.turns
    if all(_is_cut(turn) for turn in turns):
        return "all of its answers were cut by the length limit"
    if rollout.metrics.get(INVALID_ACTIONS, 0.0) >= len(turns):
        return "none of its answers was an action"
    return ""


def _is_cut(turn: Turn) -> bool:
    return turn.completion.finish_reason is FinishReason.LENGTH


def _divergence(turns: Sequence[Turn], number: int, decode: Callable[[Sequence[int]], str]) -> str:
    """Describe where the prompt after turn ``number`` first differs from that turn's tokens."""
    first, second = turns[number - 1 : number + 1]
    before = first.prompt_token_ids + first.completion.token_ids
    after = second.prompt_token_ids
    pairs = enumerate(zip(before, after, strict=False))
    at = next((n for n, (old, new) in pairs if old != new), min(len(before), len(after)))
    old, new = (decode(tokens[at : at + _CONTEXT_TOKENS]) for tokens in (before, after))
    return (
        f"the prompt of turn {number + 1} does not extend turn {number}: at token {at} it has "
        f"{new!r} where the policy saw {old!r}"
    )


def blocking_findings(watched: Watched, rollout_id: str, *, max_block_s: float) -> list[Finding]:
    """Find methods that blocked the event loop for longer than ``max_block_s``."""
    longest: dict[str, float] = {}
    for call in watched.calls:
        longest[call.method] = max(call.blocked_s, longest.get(call.method, 0.0))
    texts = [
        f"{method} blocks the event loop for {_MS * seconds:.0f} ms"
        for method, seconds in longest.items()
        if seconds > max_block_s
    ]
    return [Finding(mistake=Mistake.BLOCKING, rollout_id=rollout_id, what=one) for one in texts]


def describe_rollout(
    rollout: Rollout, watched: Watched | None, decode: Callable[[Sequence[int]], str]
) -> list[str]:
    """Describe a rollout turn by turn. Only the new part of each prompt is shown."""
    reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
    turns, episodes = len(rollout.turns), len(turns_by_episode(rollout))
    lines = [
        f"=== {rollout.rollout_id}: {rollout.status.value}, reward {reward}, "
        f"{turns} turn{'' if turns == 1 else 's'}, {episodes} episode{'' if episodes == 1 else 's'}"
    ]
    if watched is not None:
        times = [f"{method} {_took(watched, method)}" for method in ("creation", "reset", "close")]
        lines.append(f"    {', '.join(times)}")
    before: tuple[int, ...] = ()
    for number, turn in enumerate(rollout.turns):
        prompt, completion = turn.prompt_token_ids, turn.completion
        extends = bool(before) and prompt[: len(before)] == before
        new = prompt[len(before) :] if extends else prompt
        facts = [f"prompt {len(prompt)} tokens"]
        if number:
            facts[0] += f" ({len(new)} new)" if extends else f" (does not extend turn {number})"
        facts.append(f"completion {len(completion.token_ids)} ({completion.finish_reason.value})")
        if completion.metrics is not None:
            facts.append(f"decoding {_MS * completion.metrics.decode_s:.0f} ms")
        if watched is not None:
            facts.append(f"step {_took(watched, 'step', number)}")
        if turn.reward is not None:
            facts.append(f"reward {turn.reward:g}")
        lines.append(f"--- turn {number + 1}: {', '.join(facts)}")
        lines += [_text("prompt", decode(new)), _text("policy", decode(completion.token_ids))]
        before = prompt + completion.token_ids
    if rollout.metrics:
        values = ", ".join(f"{name} {value:g}" for name, value in sorted(rollout.metrics.items()))
        lines.append(f"    metrics: {values}")
    return lines


def _took(watched: Watched, method: str, index: int = 0) -> str:
    seconds = [call.seconds for call in watched.calls if call.method == method]
    return f"{_MS * seconds[index]:.1f} ms" if index < len(seconds) else "-"


def _text(who: str, text: str, most: int = 800) -> str:
    if len(text) > most:
        text = f"{text[: most // 2]} [...] {text[-most // 2 :]}"
    return f"{who}>\n{indent(text.strip(), '    ')}"
