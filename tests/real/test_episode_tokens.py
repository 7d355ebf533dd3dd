"""Token identity (design, invariant 1) over whole rollouts on a real engine, and what the trainer
says about the same tokens: for the policy that ships, and for one with float32 weights after
optimizer steps."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.real.reference import float64_logprobs
from tests.real.runs import play
from tests.real.trainer_helpers import trainer
from torchtitan_rl.configs.alphabet_sort_tiny import config
from torchtitan_rl.experiments.alphabet_sort.warm_start import Mistakes, demonstration
from torchtitan_rl.rollout.rendering import load_tokenizer, make_renderer
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import OptimizerConfig
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Episode

SHIPPED = Path(config.policy.checkpoint)
ROW_LEN = config.trainer.max_episode_tokens
SIZES = {"max_episode_tokens": ROW_LEN, "max_tokens_per_microbatch": 32 * ROW_LEN}
NUM_STEPS = 12


def pack(episodes: list[Episode]) -> TrainingBatch:
    batch = pack_episodes(episodes, row_len=ROW_LEN, temperature=1.0).batch
    assert batch is not None
    return batch


def lessons(num_steps: int) -> list[TrainingBatch]:
    """Right answers, for a few steps that move the policy as far as reinforcement would."""
    tokenizer = load_tokenizer(SHIPPED)
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")
    dataset = config.task.dataset("train", seed=0)
    episodes = (
        demonstration(
            dataset.next().data["turns"],
            mistakes=Mistakes(),
            rng=random.Random(0),
            renderer=renderer,
            tokenizer=tokenizer,
            name=f"lesson {index}",
        )
        for index in range(32 * num_steps)
    )
    return [pack(list(islice(episodes, 32))) for _ in range(num_steps)]


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, Path]:
    trained = tmp_path_factory.mktemp("trained")
    with trainer(
        SHIPPED,
        max_steps=NUM_STEPS,
        **SIZES,
        optimizer=OptimizerConfig(learning_rate=1e-3),
    ) as policy_trainer:
        for batch in lessons(NUM_STEPS):
            policy_trainer.supervised_step(batch)
        policy_trainer.export_hf(trained, dtype="float32")
    return {"shipped": SHIPPED, "trained": trained}


@pytest.fixture(scope="module")
def rollouts(policies) -> dict[str, list[dict[str, Any]]]:
    """Those of each policy, as `episode_scenario` prints them."""
    found = play("episode_scenario", *policies.values())
    return {name: found[str(path)] for name, path in policies.items()}


@pytest.mark.parametrize("policy", ["shipped", "trained"])
def test_trap_16_and_17_episode_tokens_equal_engine_tokens_over_three_turns(rollouts, policy):
    assert len(rollouts[policy]) == 32
    assert max(rollout["turns"] for rollout in rollouts[policy]) == 3
    for rollout in rollouts[policy]:
        assert rollout["tokens_equal"]
        assert rollout["logprobs_equal"]
        assert rollout["sequence_equal"]


@pytest.mark.parametrize(("policy", "bound"), [("shipped", 1e-5), ("trained", 3e-5)])
def test_trap_25_trainer_and_engine_logprobs_differ_by_float32_rounding_alone(
    policies, rollouts, policy, bound
):
    """Each side's own distance from float64 is as large as the one between them (on ~2,400 tokens:
    at most 1.8e-5 and 2.3e-5, 1e-6 in the mean square root), so no exacter trainer would be nearer
    to the engine. A real difference would move the mean."""
    batch = pack([Episode(**rollout["episode"]) for rollout in rollouts[policy]])
    with trainer(policies[policy], **SIZES) as policy_trainer:
        trained = policy_trainer.logprobs(batch)[batch.loss_mask].astype(np.float64)
    sampled = batch.logprobs[batch.loss_mask].astype(np.float64)
    exact = float64_logprobs(policies[policy], batch)[batch.loss_mask]
    assert len(sampled) > 400
    assert np.abs(trained - sampled).max() < bound
    assert np.abs(trained - sampled).mean() < 2e-6
    for found in (trained, sampled):
        assert np.abs(found - exact).max() < 5e-5
        assert np.abs(found - exact).mean() < 4e-6
