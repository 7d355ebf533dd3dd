"""What ``importance_weight`` ``auto`` becomes, and what that does to tokens that are rounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.prepare import claim_run, prepare_run
from torchtitan_rl.config.run import LaunchConfig, RunConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.training.config import LossConfig, decided_loss
from torchtitan_rl.training.losses import LossTokens, StepTotals, policy_loss

CPU = HostFacts(num_cores=16, memory_bytes=64 << 30)
CUDA = replace(CPU, cuda_devices=("0", "1", "2"))


def run_with(tmp_path: Path, *, staleness: int = 0, dtype: Any = "bfloat16", **loss: Any) -> Any:
    return replace(
        TINY,
        output_dir=tmp_path,
        policy=replace(TINY.policy, dtype=dtype),
        schedule=replace(TINY.schedule, staleness=staleness),
        trainer=replace(TINY.trainer, loss=LossConfig(**loss)),
    )


@pytest.mark.parametrize(
    ("machine", "given", "proximal", "weight"),
    [
        (CUDA, {}, "recomputed", "token"),
        (CUDA, {"staleness": 2}, "interpolated", "token"),
        (CUDA, {"mask": "geometric"}, "recomputed", "token"),
        (CUDA, {"importance_weight": "none"}, "behaviour", "none"),
        (CUDA, {"dtype": "float32"}, "behaviour", "none"),
        (CUDA, {"surrogate": "cispo"}, "behaviour", "none"),
        (CUDA, {"ratio": "sequence"}, "behaviour", "none"),
        (CPU, {}, "behaviour", "none"),
        (CPU, {"proximal_policy": "recomputed"}, "recomputed", "token"),
    ],
)
def test_runs_in_bfloat16_weigh_tokens_unless_their_loss_does_it_or_is_told_not_to(
    tmp_path: Path, machine: HostFacts, given: Any, proximal: str, weight: str
) -> None:
    prepared = prepare_run(run_with(tmp_path, **given), machine)
    loss = prepared.config.trainer.loss
    assert (loss.proximal_policy, loss.importance_weight) == (proximal, weight)
    assert prepared.identity["trainer.loss.importance_weight"] == weight
    is_decided = machine is CUDA and weight == "token"
    shown = f"loss: importance_weight {weight}, proximal_policy {proximal}"
    assert (shown in prepared.describe()) == is_decided


def test_a_resumed_run_on_hosts_has_not_changed_its_loss(tmp_path: Path) -> None:
    config: RunConfig = run_with(tmp_path)
    config = replace(config, launch=LaunchConfig(hosts="1x3"))
    with claim_run(prepare_run(config, CPU)):
        pass
    resumed = replace(config, checkpoint=replace(config.checkpoint, resume=True))
    prepared = prepare_run(resumed, CPU)
    assert prepared.config.trainer.loss.importance_weight == "token"
    assert not any("changed" in note for note in prepared.notes)


def gradients(config: LossConfig, *, ages: list[int]) -> list[float]:
    """Minus the gradient of tokens whose log-ratios are 0.3 and -0.3, with advantages 1 and -1."""
    tokens = LossTokens(
        logprobs_T=torch.tensor([0.3, -0.3], dtype=torch.float64).requires_grad_(),
        behaviour_T=torch.zeros(2, dtype=torch.float64),
        advantages_T=torch.tensor([1.0, -1.0], dtype=torch.float64),
        trained_T=torch.ones(2, dtype=torch.bool),
        ages_T=torch.tensor(ages),
        sequences_T=torch.arange(2),
    )
    totals = StepTotals(num_tokens=1, num_sequences=2)
    policy_loss(tokens, totals=totals, config=config).loss.backward()
    assert tokens.logprobs_T.grad is not None
    return [-one for one in tokens.logprobs_T.grad.tolist()]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_token_of_the_newest_weights_is_weighed_and_never_clipped_for_its_rounding(
    staleness: int,
) -> None:
    """Trap 24: once, by policy / behaviour. The clip alone would drop both tokens."""
    decided = decided_loss(LossConfig(), rounds=True, staleness=staleness)
    assert gradients(LossConfig(), ages=[0, 0]) == [0.0, 0.0]
    exact = torch.tensor([0.3, -0.3], dtype=torch.float64).exp() * torch.tensor([1.0, -1.0])
    assert gradients(decided, ages=[0, 0]) == pytest.approx(exact.tolist())


def test_tokens_of_the_version_before_are_clipped_as_without_weights() -> None:
    decided = decided_loss(LossConfig(), rounds=True, staleness=1)
    assert gradients(decided, ages=[1, 1]) == gradients(LossConfig(), ages=[1, 1])
