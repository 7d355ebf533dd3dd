"""Agents through the real rollouter: turns, limits, errors, and what becomes of each request."""

from __future__ import annotations

from tests.fast.agents import Hosted, three_turns
from tests.fast.resuming import SeededGenerate
from tests.fast.rollouts import PROBLEM, config
from tests.fast.virtual_clock import run_virtually
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.types import RolloutStatus


def roll_out(hosted: Hosted, *, generate=None, size=1, rubric=None, **limits):
    rollouter = Rollouter(
        generate=generate or SeededGenerate(),
        environment=hosted,
        config=config(**{"max_turns": 5, "max_tokens_per_turn": 3, **limits}),
        rubric=rubric,
    )
    group = run_virtually(rollouter.run_group("g", PROBLEM, size=size, seed=7))
    return group.rollouts


def only(agent, **options):
    host_options = {k: options.pop(k) for k in ("grace_s", "reward_at_limit") if k in options}
    hosted = Hosted(agent, **host_options)
    (rollout,) = roll_out(hosted, **options)
    return rollout, hosted


def test_an_agents_requests_are_its_rollouts_turns_and_one_episode():
    rollout, hosted = only(three_turns)
    assert rollout.status is RolloutStatus.COMPLETED
    assert [turn.completion.request_id for turn in rollout.turns] == [
        "g/r0/t0",
        "g/r0/t1",
        "g/r0/t2",
    ]
    (episode,) = rollout_to_episodes(rollout, 1.0)
    assert episode.num_trained_tokens == rollout.num_sampled_tokens
    assert rollout.reward == sum(episode.token_ids)
    assert hosted.sessions.counts()["sessions_rewarded"] == 1
    assert hosted.sessions.counts()["sessions_open"] == 0
