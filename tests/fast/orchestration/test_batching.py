from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import turns
from tests.support.turns import group, turn
from torchtitan_rl.distillation.config import TeacherConfig
from torchtitan_rl.errors import DivergedError
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.orchestration.ledger import MASKED_CAUSES
from torchtitan_rl.rollout.config import OverlongConfig, RolloutConfig, SamplingConfig
from torchtitan_rl.token_sets import WHOLE_VOCABULARY
from torchtitan_rl.types import FinishReason, Grammar, Rollout, RolloutStatus

CONFIG = RolloutConfig(sampling=SamplingConfig(temperature=0.7, max_tokens_per_turn=10))
BATCHER = EpisodeBatcher(config=CONFIG, row_len=32)
PAIRS = replace(BATCHER, config=replace(CONFIG, advantage="pair"))


def rollout(
    index: int,
    reward: float | None,
    *,
    status: RolloutStatus = RolloutStatus.COMPLETED,
    prompt_len: int = 3,
    num_sampled: int = 2,
    logprob: float = -0.5,
) -> Rollout:
    one = turn(range(prompt_len), [9] * num_sampled, logprobs=[logprob] * num_sampled, versions=[4])
    return turns.rollout(one, rollout_id=f"g/r{index}", reward=reward, status=status)


def test_turns_that_no_agent_saw_are_masked_by_name_unless_their_rollout_failed():
    half = rollout(0, 1.0, num_sampled=5)
    unseen = replace(half, turns=(replace(half.turns[0], is_seen=False),))
    failed = replace(unseen, rollout_id="r2", reward=None, status=RolloutStatus.ENV_ERROR)
    _, tokens, *_ = BATCHER([group(unseen, rollout(1, 0.0), failed)])
    assert tokens.discarded == {"unseen_turn": 5, "env_error": 5}
    assert (tokens.generated, tokens.trained) == (12, 2)
    assert "unseen_turn" in MASKED_CAUSES


def test_tokens_of_which_it_is_not_known_what_they_were_sampled_from_are_masked_by_name():
    cut, grammar = rollout(0, 1.0, num_sampled=4), rollout(1, 0.0, num_sampled=3)
    kept = (WHOLE_VOCABULARY, None, b"\x09\0\0\0", None)
    rules = Grammar(data=b"", stop_token_ids=())
    cut = turns.rollout(turns.with_kept(cut.turns[0], kept), reward=1.0)
    grammar = turns.rollout(
        turns.with_kept(grammar.turns[0], (rules, rules, WHOLE_VOCABULARY)),
        rollout_id="g/r1",
        reward=0.0,
    )
    batch, tokens, *_ = BATCHER([group(cut, grammar)])
    assert tokens.discarded == {"truncated_sampling": 4}
    assert (tokens.generated, tokens.trained) == (7, 3)
    assert batch is not None
    assert batch.loss_mask.tolist() == [
        *(False, False, False, True, False, True, False),
        *(False, False, False, False, False, True),
    ]
    assert "truncated_sampling" in MASKED_CAUSES


def test_trap_18_a_failed_sibling_is_discarded_alone_and_named():
    failed = rollout(2, None, status=RolloutStatus.ENV_ERROR, num_sampled=5)
    batch, tokens, *_ = BATCHER([group(rollout(0, 1.0), rollout(1, 0.0), failed)])
    assert batch is not None
    assert sorted(batch.advantages[batch.loss_mask].tolist()) == [-0.5, -0.5, 0.5, 0.5]
    assert tokens.discarded == {"env_error": 5}


def test_episodes_have_the_number_of_their_tasks_teacher_in_the_trainer():
    teacher = TeacherConfig(by_task={"a": "A", "b": "B"}, loss="full", coefficient=0.5)
    siblings = [rollout(0, 1.0, prompt_len=40), rollout(1, 1.0), rollout(2, 0.0)]
    groups = [
        group(
            *(replace(one, group_id=f"g{task}") for one in siblings),
            group_id=f"g{task}",
            problem=replace(turns.PROBLEM, task=task),
        )
        for task in "bca"
    ]
    batch, plain = (one(groups).batch for one in (replace(BATCHER, teacher=teacher), BATCHER))
    assert batch is not None
    assert plain is not None
    assert batch.teachers is not None
    assert batch.teachers.tolist() == [1, 1, -1, -1, 0, 0]
    assert batch.teacher_coefficient == 0.5
    assert batch.advantages.tolist() == plain.advantages.tolist()
    assert plain.teachers is None


def test_trap_20_an_episode_longer_than_a_row_is_counted_not_lost():
    long = rollout(1, 0.0, prompt_len=30, num_sampled=6)
    batch, tokens, *_ = BATCHER([group(rollout(0, 1.0), long)])
    assert batch is not None
    assert tokens.discarded == {"oversized_episode": 6}


def test_trap_15_tokens_with_a_logprob_that_is_not_finite_are_counted_as_masked():
    bad = rollout(1, 0.0, logprob=math.nan, num_sampled=3)
    _, tokens, *_ = BATCHER([group(rollout(0, 1.0), bad)])
    assert tokens.discarded == {"nonfinite_logprob": 3}
    assert tokens.trained == 2


def test_trap_29_a_batch_without_one_finite_logprob_is_a_diverged_policy_not_an_empty_step():
    bad = [rollout(index, 1.0, logprob=math.nan, num_sampled=3) for index in range(2)]
    failed = rollout(2, None, status=RolloutStatus.ENV_ERROR)
    with pytest.raises(DivergedError, match=r"no loss .* 6 sampled tokens"):
        BATCHER([group(*bad, failed)])


some_rollouts = st.builds(
    rollout,
    st.integers(0, 99),
    st.none() | st.floats(0, 1),
    status=st.just(RolloutStatus.ENV_ERROR),
    prompt_len=st.integers(1, 20),
    num_sampled=st.integers(0, 20),
    logprob=st.sampled_from([-1.0, math.nan, -math.inf]),
)


@pytest.mark.parametrize("batcher", [BATCHER, PAIRS], ids=["mean", "pair"])
@settings(max_examples=40)
@given(st.lists(st.lists(some_rollouts, min_size=1, max_size=4), max_size=4))
def test_generated_tokens_are_trained_or_discarded_by_name(batcher, groups):
    healthy = [rollout(0, 1.0), rollout(1, 0.0)]
    _, tokens, *_ = batcher([group(*rollouts) for rollouts in [*groups, healthy]])
    assert tokens.generated == tokens.trained + sum(tokens.discarded.values())


def test_only_the_best_and_the_worst_rollout_of_a_group_are_a_pair():
    siblings = [rollout(index, reward) for index, reward in enumerate([0.5, 1.0, 0.0, 1.0])]
    equal = [rollout(index, 1.0, num_sampled=3) for index in range(2)]
    batched = PAIRS([group(*siblings), group(*equal, group_id="equal")])
    assert batched.batch is not None
    assert [one.rollout_id for one in batched.episodes] == ["g/r1", "g/r2"]
    assert batched.batch.advantages[batched.batch.loss_mask].tolist() == [1.0, 1.0, -1.0, -1.0]
    assert batched.tokens.trained == 4
    assert batched.tokens.discarded == {"unpaired": 10}
    assert "unpaired" in MASKED_CAUSES


def branched(index: int, reward: float) -> Rollout:
    """A rollout of two episodes, because the history of its second turn was edited."""
    first, second = (turn(prompt, [9, 9], versions=[4]) for prompt in ([1, 2], [3, 4]))
    return turns.rollout(first, second, rollout_id=f"g/r{index}", reward=reward)


def test_a_pair_has_all_episodes_of_its_rollouts_or_is_left_out():
    best, worst = branched(0, 1.0), rollout(1, 0.0)
    batched = PAIRS([group(best, worst)])
    assert [one.rollout_id for one in batched.episodes] == ["g/r0", "g/r0", "g/r1"]
    too_long = replace(best.turns[1], prompt_token_ids=tuple(range(40)))
    batched = PAIRS([group(replace(best, turns=(best.turns[0], too_long)), worst)])
    assert batched.batch is None
    assert batched.tokens.discarded == {"oversized_episode": 2, "unpaired": 4}


@pytest.mark.parametrize(
    ("broken", "discarded"),
    [
        (rollout(1, 0.0, prompt_len=30, num_sampled=6), {"oversized_episode": 6, "unpaired": 2}),
        (rollout(1, 0.0, logprob=math.nan, num_sampled=3), {"nonfinite_logprob": 3, "unpaired": 2}),
        (rollout(1, 0.0, num_sampled=0), {"unpaired": 2}),
    ],
    ids=["too long", "not finite", "empty"],
)
def test_a_group_whose_worst_rollout_cannot_be_trained_on_has_no_pair(broken, discarded):
    healthy = group(rollout(0, 1.0), rollout(1, 0.0), group_id="healthy")
    batched = PAIRS([group(rollout(0, 1.0), broken), healthy])
    assert batched.tokens.trained == 4
    assert batched.tokens.discarded == discarded


def cut(rollout: Rollout) -> Rollout:
    """It ended at its budget."""
    last = rollout.turns[-1]
    completion = replace(last.completion, finish_reason=FinishReason.LENGTH)
    return replace(rollout, turns=(*rollout.turns[:-1], replace(last, completion=completion)))


@pytest.mark.parametrize(
    ("num_sampled", "is_cut", "advantage"),
    [(6, False, 0.0), (8, False, -0.25), (10, False, -0.5), (10, True, -0.5), (3, True, -0.5)],
)
def test_an_answer_near_the_limit_loses_reward_in_proportion(num_sampled, is_cut, advantage):
    """With a limit of 10 and a buffer of 4; both siblings are right."""
    batcher = replace(BATCHER, config=replace(CONFIG, overlong=OverlongConfig(buffer_tokens=4)))
    long = rollout(0, 1.0, num_sampled=num_sampled)
    batch, *_ = batcher([group(cut(long) if is_cut else long, rollout(1, 1.0, num_sampled=2))])
    assert batch is not None
    values = batch.advantages[batch.loss_mask].tolist()
    assert min(values) == pytest.approx(advantage)
    assert max(values) == pytest.approx(-advantage)


def test_a_cut_answer_can_be_masked_and_still_counts_in_the_baseline():
    batcher = replace(BATCHER, config=replace(CONFIG, overlong=OverlongConfig(mask=True)))
    batch, tokens, *_ = batcher([group(cut(rollout(0, 0.0, num_sampled=5)), rollout(1, 1.0))])
    assert batch is not None
    assert batch.advantages[batch.loss_mask].tolist() == [0.5, 0.5]
    assert (tokens.trained, tokens.discarded) == (2, {"overlong": 5})
    assert "overlong" in MASKED_CAUSES
