"""A trainer on the installed device, judged by `transformers` and by a trainer on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.real.models import tiny_model
from tests.real.test_trainer_sharing import tree_batch
from tests.real.trainer_helpers import ROW_LEN, hf_packed_logprobs, trainer
from torchtitan_rl.training.config import LossConfig, OptimizerConfig

IS_CUDA = torch.cuda.is_available()
# On a CPU, tests/real/test_trainer_one_process.py and test_trainer_sharing.py show the same.
pytestmark = [] if IS_CUDA else [pytest.mark.soak]
TOLERANCE = 2e-4 if IS_CUDA else 1e-5  # of logprobs in float32
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "small microbatches": {"max_tokens_per_microbatch": ROW_LEN},
    "reference": {"loss": LossConfig(kl_coefficient=0.1)},
} | ({"compiled": {"compile": True}} if IS_CUDA else {})
# Its first steps are near the gradient, not its sign: rounding stays rounding.
OPTIMIZER = OptimizerConfig(learning_rate=1.0, eps=1e3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy") / "tied")


@pytest.fixture(scope="module")
def on_the_cpu(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One plain step where no CUDA device can be seen: its logprobs before and after."""
    out = tmp_path_factory.mktemp("cpu") / "step.npz"
    command = [sys.executable, "-m", "tests.gpu.test_trainer", str(checkpoint), str(out)]
    subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)
    return dict(np.load(out))


def one_step(checkpoint: Path, **fields: Any) -> dict[str, Any]:
    batch = tree_batch(0)
    fields = {"dtype": "float32", "optimizer": OPTIMIZER, **fields}
    with trainer(checkpoint, **fields) as policy_trainer:
        before = policy_trainer.logprobs(batch)
        metrics = policy_trainer.train_step(batch).metrics
        return {
            "before": before,
            "grad_norm": metrics["grad_norm"],
            "after": policy_trainer.logprobs(batch),
        }


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def test_logprobs_are_those_of_transformers(checkpoint: Path) -> None:
    batch = tree_batch(0)
    with trainer(checkpoint, dtype="float32") as policy_trainer:
        found = policy_trainer.logprobs(batch)
    expected = hf_packed_logprobs(checkpoint, batch)
    np.testing.assert_allclose(found[batch.loss_mask], expected[batch.loss_mask], atol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_is_that_of_a_cpu(
    variant: str, checkpoint: Path, on_the_cpu: dict[str, Any]
) -> None:
    found = one_step(checkpoint, **VARIANTS[variant])
    np.testing.assert_allclose(found["before"], on_the_cpu["before"], atol=TOLERANCE)
    np.testing.assert_allclose(found["after"], on_the_cpu["after"], atol=5 * TOLERANCE)
    if variant != "reference":
        assert found["grad_norm"] == pytest.approx(on_the_cpu["grad_norm"], rel=1e-3)
    assert np.abs(on_the_cpu["after"] - on_the_cpu["before"]).max() > 50 * TOLERANCE


def test_unshared_rows_in_bfloat16_are_the_shared_ones_up_to_rounding(checkpoint: Path) -> None:
    """On Hopper and Blackwell without FlashAttention 3 and 4, which torchtitan would take."""
    batch, of_sides = tree_batch(0), []
    for share_prefixes in (True, False):
        fields = {"dtype": "bfloat16", "share_prefixes": share_prefixes}
        with trainer(checkpoint, **fields) as policy_trainer:
            of_sides.append(policy_trainer.logprobs(batch)[batch.loss_mask])
            policy_trainer.train_step(batch)
    assert np.abs(of_sides[0] - of_sides[1]).mean() < 0.05


def test_offload_and_onload_keep_every_bit_and_free_the_device(checkpoint: Path) -> None:
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.train_step(tree_batch(0))
        before = copies(policy_trainer.state_tensors())
        policy_trainer.offload()
        if IS_CUDA:
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in local(policy_trainer))
        policy_trainer.onload()
        after = list(policy_trainer.state_tensors())
        assert len(before) == len(after) > 10
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        policy_trainer.train_step(tree_batch(1))


def local(policy_trainer: Any) -> Iterable[torch.Tensor]:
    from torch.distributed.tensor import DTensor

    for tensor in policy_trainer.state_tensors():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.device.type != "cpu":  # a count of steps may be on the CPU
            yield own


def test_a_checkpoint_comes_back_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-000001"
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.train_step(tree_batch(0))
        policy_trainer.save_checkpoint(path)
        before = copies(policy_trainer.state_tensors())
        policy_trainer.train_step(tree_batch(1))  # while the checkpoint is written
        policy_trainer.finish_checkpoint()
        policy_trainer.load_checkpoint(path)
        after = policy_trainer.state_tensors()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


if __name__ == "__main__":
    policy, out = map(Path, sys.argv[1:])
    np.savez(out, **one_step(policy))
