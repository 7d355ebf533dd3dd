"""Rollouts as bytes: everything comes back equal, floats to the last bit."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.turns import group, rollout, turn
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.records import (
    EnvState,
    RecordedRollout,
    SavedRollout,
    restored_rollout,
    saved_rollout,
    short_group,
    to_bytes,
    whole_group,
)
from torchtitan_rl.routed_experts import to_routed
from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_runs
from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    FinishReason,
    Grammar,
    Problem,
    Rollout,
    RolloutGroup,
    Turn,
    VersionRun,
)

TOKENS = st.lists(st.integers(0, 2**31), max_size=6).map(tuple)
KEPT = (WHOLE_VOCABULARY, None, b"\x05\x00\x00\x80", Grammar(data=b"{}", stop_token_ids=(0, 7)))
EXPERTS = to_routed(np.arange(8, dtype=np.uint8).reshape(2, 2, 2))
FLOATS = st.floats(allow_nan=False)
METRICS = CompletionMetrics(
    queue_s=0.1,
    time_to_first_token_s=1 / 3,
    decode_s=2.0,
    inter_token_latency_s=1e-9,
    cached_tokens=3,
    requests_in_flight=4,
)


@st.composite
def completions(draw):
    token_ids = draw(TOKENS)
    starts = sorted(draw(st.sets(st.integers(1, 5), max_size=2)))
    runs = [VersionRun(0, 2), *(VersionRun(s, 3 + s) for s in starts if s < len(token_ids))]
    return Completion(
        request_id=draw(st.text(max_size=5)),
        token_ids=token_ids,
        logprobs=tuple(draw(FLOATS) for _ in token_ids),
        version_runs=tuple(runs) if token_ids else (),
        finish_reason=draw(st.sampled_from(FinishReason)),
        metrics=draw(st.sampled_from([None, METRICS])),
        replica=draw(st.sampled_from(["", "replica 1"])),
        stop_reason=draw(st.sampled_from([None, 7, "END"])),
        top_logprobs=draw(st.sampled_from([(), (((5, -0.5), (6, -1 / 3)),) * len(token_ids)])),
        kept_tokens=draw(st.sampled_from([(), kept_runs(KEPT[token % 4] for token in token_ids)])),
        routed_experts=draw(st.sampled_from([None, EXPERTS])),
    )


TURNS = st.lists(
    st.builds(
        Turn,
        prompt_token_ids=TOKENS,
        completion=completions(),
        reward=st.none() | FLOATS,
        text=st.none() | st.text(max_size=3),
        is_seen=st.booleans(),
        branch_reward=st.none() | FLOATS,
        request_key=st.none() | st.text(max_size=3),
    ),
    max_size=3,
)


@st.composite
def turn_lists(draw):
    """Some prompts extend the turn before."""
    turns: list[Turn] = []
    for one in draw(TURNS):
        if turns and draw(st.booleans()):
            before = turns[-1].prompt_token_ids + turns[-1].completion.token_ids
            one = replace(one, prompt_token_ids=before + one.prompt_token_ids)
        turns.append(one)
    return tuple(turns)


def rollouts():
    return st.builds(
        Rollout,
        rollout_id=st.just("g/r0"),
        group_id=st.just("g"),
        problem_id=st.just("p"),
        turns=turn_lists(),
        reward=st.none() | FLOATS,
        cause=st.none() | st.text(max_size=3),
        messages=st.just(({"role": "user", "content": "ü", "tool_calls": [{"x": [1, None]}]},)),
        metrics=st.builds(lambda value: {"reward/a": value}, FLOATS),
    )


@st.composite
def recorded_rollouts(draw):
    if draw(st.booleans()):
        ended = draw(rollouts())
        return RecordedRollout(rollout_id="g/r0", turns=ended.turns, ended=ended)
    turns, state = draw(turn_lists()), '{"deck": [3, 1, 2], "n": null, "x": 0.1}'
    prompt = (turns[-1].prompt_token_ids + turns[-1].completion.token_ids if turns else ()) + (7,)
    observations = [
        Observation(prompt_token_ids=prompt, max_tokens=4, stop_token_ids=(9,), turn_reward=0.1),
        Observation(prompt_token_ids=prompt, constraints={"structured_outputs": {"regex": "a"}}),
        Observation(prompt_token_ids=prompt, stop=("END",), num_logprobs=3),
    ]
    terminals = [
        Terminal(reward=0.3, turn_text="t", metrics={"m": 1.5}),
        Terminal(reward=0.3),
    ]
    answers = [{"observation": one} for one in observations]
    answers += [{"terminal": one} for one in terminals]
    answer = draw(st.sampled_from(answers))
    return RecordedRollout(
        rollout_id="g/r0",
        turns=turns,
        env_states={len(turns): EnvState(**answer, state=state, messages=({"role": "a"},))},
        partial=draw(st.none() | completions()),
        prompt_token_ids=prompt,
    )


def restored(whole: RolloutGroup) -> RolloutGroup:
    return whole_group(msgspec.msgpack.decode(to_bytes(short_group(whole)), type=RolloutGroup))


def read(recorded: RecordedRollout) -> RecordedRollout:
    data = to_bytes(saved_rollout(recorded))
    return restored_rollout(msgspec.msgpack.decode(data, type=SavedRollout))


@settings(max_examples=30, deadline=None)
@given(st.lists(rollouts(), max_size=3))
def test_a_group_comes_back_equal(members):
    problem = Problem(problem_id="p", data={"turns": [["a", "b"]], "seed": 3})
    whole = group(*members, problem=problem)
    assert restored(whole) == whole


@settings(max_examples=30, deadline=None)
@given(recorded_rollouts())
def test_a_recorded_rollout_comes_back_equal(recorded):
    assert read(recorded) == recorded


def test_logprobs_that_are_not_finite_survive():
    turns = (turn((1,), (2, 3), logprobs=(math.nan, -math.inf)),)
    back = read(RecordedRollout(rollout_id="r", turns=turns))
    assert list(map(str, back.turns[0].completion.logprobs)) == ["nan", "-inf"]


def test_what_users_code_returned_can_be_written_whatever_it_is():
    """A checkpoint that cannot be read ends a run."""
    messages = ({"role": "user", "a": object, "b": "\ud800", "c": 2**70, (1, 2): np.float64(0.5)},)
    metrics = {"exact": True, "mean": np.float32(0.5)}
    whole = group(rollout(messages=messages, metrics=metrics, reward=np.float64(1.0)))
    (back,) = restored(whole).rollouts
    (message,) = back.messages
    assert message == {
        "role": "user",
        "a": "<class 'object'>",
        "b": "\\ud800",
        "c": str(2**70),
        "(1, 2)": 0.5,
    }
    assert back.metrics == {"exact": 1.0, "mean": 0.5}
    assert back.reward == 1.0
