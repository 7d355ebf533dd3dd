"""Episodes of rollouts: every sampled token is trained on once, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.turns import rollout, turn, with_experts, with_kept
from torchtitan_rl.rollout.episodes import num_unseen_tokens, rollout_to_episodes
from torchtitan_rl.routed_experts import of_new_tokens
from torchtitan_rl.types import UNKNOWN_EXPERT, Turn


def test_an_unedited_rollout_is_one_episode_with_loss_on_sampled_tokens_only():
    (episode,) = rollout_to_episodes(
        rollout(
            turn([1, 2], [3, 4], logprobs=[-0.1, -0.2], versions=[5, 6]),
            turn([1, 2, 3, 4, 9, 9], [5], logprobs=[-0.3], versions=[7]),
        ),
        advantage=0.5,
    )
    assert episode.token_ids == (1, 2, 3, 4, 9, 9, 5)
    assert episode.loss_mask == (False, False, True, True, False, False, True)
    assert episode.logprobs == (0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.3)
    assert episode.versions == (-1, -1, 5, 6, -1, -1, 7)
    assert episode.advantages == (0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.5)
    assert (episode.rollout_id, episode.group_id) == ("g/r0", "g")


def test_each_token_has_the_experts_of_the_turn_that_computed_it_first():
    first = with_experts(turn([1, 2], [3, 4]), 11, 12, 13)
    second = with_experts(turn([1, 2, 3, 4, 9], [5, 6]), 21, 22, 23, 24, 25, 26)
    other = turn([1, 2, 3, 4, 9, 5, 6, 9], [7])  # whose experts are not known
    last = with_experts(turn([1, 2, 3, 4, 9, 5, 6, 9, 7], [8]), *range(31, 40))
    expected = [11, 12, 13, 24, 25, 26, 37, 38, 39, UNKNOWN_EXPERT]
    for turns in ([first, second, other, last], [first, of_new_tokens(second, [first]), last]):
        (episode,) = rollout_to_episodes(rollout(*turns), advantage=1.0)
        assert list(episode.routed_experts.data) == expected
    assert of_new_tokens(second, [first]).completion.routed_experts.num_tokens == 3
    unseen = replace(first, is_seen=False)  # it will be in no episode
    assert of_new_tokens(second, [unseen, other]) == second
    (episode,) = rollout_to_episodes(rollout(of_new_tokens(second, [first])), advantage=1.0)
    assert list(episode.routed_experts.data) == [UNKNOWN_EXPERT] * 3 + [24, 25, 26, UNKNOWN_EXPERT]
    (episode,) = rollout_to_episodes(rollout(other), advantage=1.0)
    assert episode.routed_experts is None


def test_a_turn_that_no_agent_saw_is_in_no_episode_and_opens_none():
    first, unseen = turn([1, 2], [3]), replace(turn([1, 2, 3], [7, 8]), is_seen=False)
    seen = rollout(first, unseen, turn([1, 2, 3, 4], [5]))
    (episode,) = rollout_to_episodes(seen, advantage=1.0)
    assert episode.token_ids == (1, 2, 3, 4, 5)
    assert episode.num_trained_tokens + num_unseen_tokens(seen) == seen.num_sampled_tokens == 4


@given(order=st.permutations(range(5)))
def test_the_episodes_do_not_depend_on_the_order_in_which_turns_ended(order):
    made = (
        turn([1], [2]),
        turn([1, 2, 3], [4]),
        turn([1, 2, 3, 4, 5], [6]),
        turn([1, 2, 9], [4]),
        turn([5], [6]),
    )
    episodes = rollout_to_episodes(rollout(*(made[index] for index in order)), advantage=1.0)
    assert episodes == rollout_to_episodes(rollout(*made), advantage=1.0)
    assert len(episodes) == 3


def test_misaligned_fields_are_refused():
    with pytest.raises(ValueError, match=r"g/r0/t0.*\(2, 1, 2\)"):
        rollout_to_episodes(rollout(turn([1], [2, 3], logprobs=[-1.0])), advantage=1.0)
    with pytest.raises(ValueError, match=r"g/r0/t0.*start at \[0, 1\], for 1 tokens"):
        rollout_to_episodes(rollout(with_kept(turn([1], [2]), (None, b""))), advantage=1.0)
    for rows, found in (((1, 2, 3), 3), ((1,), 1)):
        made = rollout(with_experts(turn([1], [2, 3]), *rows))
        with pytest.raises(ValueError, match=rf"g/r0/t0: routed experts are of {found} tokens"):
            rollout_to_episodes(made, advantage=1.0)


@st.composite
def turns(draw) -> list[Turn]:
    """Turns with unique sampled tokens; each prompt extends the last turn, or is edited."""
    made: list[Turn] = []
    context: list[int] = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    fresh = 100
    for _ in range(draw(st.integers(0, 5))):
        sampled = list(range(fresh, fresh + draw(st.integers(0, 3))))
        fresh += len(sampled)
        logprobs = [-0.25 * token for token in sampled]
        num_first = draw(st.integers(1, max(1, len(sampled) - 1)))
        versions = [draw(st.integers(0, 3))] * num_first + [9]
        versions = versions[: len(sampled)]
        made.append(turn(context, sampled, logprobs=logprobs, versions=versions))
        context = context + sampled + draw(st.lists(st.integers(0, 5), max_size=3))
        if draw(st.booleans()):
            cut = draw(st.integers(0, len(context)))
            context = context[:cut] + draw(st.lists(st.integers(0, 5), min_size=1, max_size=2))
    return made


@given(turns())
def test_each_sampled_token_is_trained_on_once(made):
    """Each sampled token is under loss exactly once, with its own logprob and version."""
    episodes = rollout_to_episodes(rollout(*made), advantage=2.0)
    trained = [
        fields
        for episode in episodes
        for *fields, mask in zip(
            episode.token_ids,
            episode.logprobs,
            episode.versions,
            episode.advantages,
            episode.loss_mask,
            strict=True,
        )
        if mask
    ]
    assert sorted(trained) == [
        [token, logprob, version, 2.0]
        for one in made
        for token, logprob, version in zip(
            one.completion.token_ids,
            one.completion.logprobs,
            one.completion.versions,
            strict=True,
        )
    ]
