"""The policy step's objective in one process: the proximal policy and the reference model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.real.trainer_helpers import random_batch, trainer
from torchtitan_rl.training.config import LossConfig


def test_a_recomputed_proximal_policy_is_what_a_forward_pass_before_the_step_returns(
    checkpoint: Path,
) -> None:
    """Against the plain way: logprobs before the step as behaviour, advantages times weights."""
    cap = 2.0
    loss = LossConfig(
        proximal_policy="recomputed", importance_weight="token", importance_weight_cap=cap
    )
    batch = random_batch()
    with trainer(checkpoint, loss=loss) as policy_trainer:
        found = policy_trainer.train_step(batch).metrics
        weights = policy_trainer.hf_state_dict()
    with trainer(checkpoint) as policy_trainer:
        proximal = policy_trainer.logprobs(batch)
        correction = np.minimum(np.exp(proximal - batch.logprobs), cap)
        plain = replace(batch, logprobs=proximal, advantages=batch.advantages * correction)
        expected = policy_trainer.train_step(plain).metrics
        state = policy_trainer.hf_state_dict()
    assert (correction[batch.loss_mask] == cap).any()
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, tensor in state.items():
        torch.testing.assert_close(weights[name], tensor, atol=5e-5, rtol=0)


def test_the_reference_is_the_initial_policy_also_after_a_resume(
    checkpoint: Path, tmp_path: Path
) -> None:
    loss = LossConfig(kl_coefficient=0.1)
    batches = [random_batch(seed=seed) for seed in range(3)]
    with trainer(checkpoint, loss=loss) as policy_trainer:
        steps = [policy_trainer.train_step(batch).metrics for batch in batches[:2]]
        trained = policy_trainer.logprobs(batches[2])
        policy_trainer.save_checkpoint(tmp_path / "step-000002", {})
        steps.append(policy_trainer.train_step(batches[2]).metrics)
    with trainer(checkpoint, loss=loss) as policy_trainer:
        initial = policy_trainer.logprobs(batches[2])
        policy_trainer.load_checkpoint(tmp_path / "step-000002")
        resumed = policy_trainer.train_step(batches[2]).metrics
    assert steps[0]["kl_reference"] == 0.0
    difference = (initial - trained)[batches[2].loss_mask].astype(np.float64)
    expected = (np.exp(difference) - 1.0 - difference).mean()
    assert expected > 1e-3
    assert resumed["kl_reference"] == pytest.approx(expected, rel=1e-4)
    assert resumed["kl_reference"] == steps[2]["kl_reference"]
    assert resumed["loss"] == steps[2]["loss"]
