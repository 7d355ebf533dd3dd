"""Steps on shared prefixes are the steps on unshared rows: loss, gradients, logprobs, metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.real.models import tiny_model
from tests.real.trainer_helpers import ROW_LEN, free_ports, run_ranks, trainer
from tests.support.episodes import batch_of, make_episode
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import LossConfig, OptimizerConfig

LOSSES = {
    "clip": LossConfig(),
    "cispo": LossConfig(surrogate="cispo", clip_low=0.9, aggregation="constant", constant_length=8),
    "sequence": LossConfig(
        ratio="sequence", aggregation="sequence_mean", mask="geometric", mask_low=0.2, mask_high=4.0
    ),
    "decoupled": LossConfig(proximal_policy="interpolated", importance_weight="sequence"),
    "reference": LossConfig(
        proximal_policy="recomputed", importance_weight="token", kl_coefficient=0.1
    ),
}
# With an epsilon far above the gradient, AdamW's first step is 1,000 times the gradient.
PLAIN = OptimizerConfig(learning_rate=1e9, eps=1e6, max_grad_norm=1e9)
TIMINGS = (
    "step_s",
    "tokens_per_second",
    "tokens_per_second_per_rank",
    "flops_per_second_per_rank",
)
EXACT = ("weights_digest",)  # gradients differ by rounding
OF_ROWS = ("computed_tokens", "shared_share")


def tree_batch(seed: int) -> TrainingBatch:
    """Groups with one system prompt; siblings that part at once, late, or not at all; branches; all
    with logprobs, advantages, versions, masks and kept tokens of their own, also on tokens that
    they share."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 288, 4).tolist()
    sequences: list[list[int]] = []
    for _ in range(3):
        prompt = [*system, *rng.integers(0, 288, rng.integers(3, 12)).tolist()]
        group: list[list[int]] = []
        for _ in range(5):
            stem = group[rng.integers(len(group))] if group and rng.random() < 0.5 else prompt
            stem = stem[: rng.integers(len(prompt), len(stem) + 1)]
            room = ROW_LEN - len(stem)
            size = rng.integers(0 if stem is not prompt else 1, min(room, 15) + 1)
            group.append([*stem, *rng.integers(0, 288, size).tolist()])
        group.append(list(group[-1]))  # two siblings may say the same
        sequences += group
    episodes = []
    for index, tokens in enumerate(sequences):
        mask = (rng.random(len(tokens)) < 0.7) & (np.arange(len(tokens)) > 3)
        # Episodes of which nothing was cut are in most batches.
        vocab_size = 288 if index % 3 else 0
        own = make_episode(tokens, mask.tolist(), seed=1000 * seed + index, cut_from=vocab_size)
        episodes.append(own)
    return batch_of(episodes, row_len=ROW_LEN)


def one_step(checkpoint: Path, batch: TrainingBatch, *, on: bool, **fields: Any) -> dict[str, Any]:
    with trainer(checkpoint, share_prefixes=on, optimizer=PLAIN, **fields) as policy_trainer:
        logprobs = policy_trainer.logprobs(batch)
        before = copy_of_weights(policy_trainer)
        metrics = policy_trainer.train_step(batch).metrics
        after = copy_of_weights(policy_trainer)
    return {
        "logprobs": logprobs,
        "metrics": metrics,
        "gradients": {name: before[name] - after[name] for name in before},
    }


def copy_of_weights(policy_trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy_trainer.hf_state_dict().items()}


def check_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        largest = float(tensor.abs().max())
        assert largest > 0.0, name
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5 * largest)


def check_equal(shared: dict[str, Any], unshared: dict[str, Any]) -> None:
    np.testing.assert_allclose(shared["logprobs"], unshared["logprobs"], rtol=1e-5, atol=1e-5)
    found, expected = shared["metrics"], unshared["metrics"]
    assert found.keys() == expected.keys()
    for name in expected.keys() - {*TIMINGS, *OF_ROWS, *EXACT}:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    check_gradients(shared["gradients"], unshared["gradients"])
    assert expected["shared_share"] == 0.0
    assert found["shared_share"] > 0.3
    assert found["computed_tokens"] < 0.7 * expected["computed_tokens"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_gradients_logprobs_and_metrics_equal_those_of_unshared_rows(
    checkpoint: Path, loss: str, seed: int
) -> None:
    batch = tree_batch(seed)
    shared, unshared = (
        one_step(checkpoint, batch, on=on, loss=LOSSES[loss]) for on in (True, False)
    )
    check_equal(shared, unshared)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens_per_microbatch": ROW_LEN},
        {"max_tokens_per_microbatch": 100 * ROW_LEN},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
    ],
    ids=str,
)
def test_they_do_so_however_the_trees_are_cut_and_activations_recomputed(
    checkpoint: Path, fields: dict[str, Any]
) -> None:
    batch = tree_batch(2)
    check_equal(
        one_step(checkpoint, batch, on=True, **fields), one_step(checkpoint, batch, on=False)
    )


def test_supervised_steps_share_too(checkpoint: Path) -> None:
    batch, gradients = tree_batch(3), []
    for on in (True, False):
        with trainer(checkpoint, share_prefixes=on, optimizer=PLAIN) as policy_trainer:
            before = copy_of_weights(policy_trainer)
            metrics = policy_trainer.supervised_step(batch).metrics
            after = copy_of_weights(policy_trainer)
            gradients.append({name: before[name] - after[name] for name in before})
        assert (metrics["shared_share"] > 0.3) is on
    check_gradients(*gradients)


def test_a_step_on_shared_prefixes_is_the_same_bit_for_bit_each_time(checkpoint: Path) -> None:
    first, second = (one_step(checkpoint, tree_batch(4), on=True) for _ in range(2))
    for name, gradient in first["gradients"].items():
        assert torch.equal(second["gradients"][name], gradient)
    assert np.array_equal(first["logprobs"], second["logprobs"])


def one_rank(rank: int, layouts: dict[str, dict[str, Any]], root: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    for (name, fields), port in zip(layouts.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        result = one_step(
            root / "policy", tree_batch(5), on=True, loss=LOSSES["reference"], **fields
        )
        if rank == 0:
            torch.save(result["gradients"], root / f"{name}.pt")
            np.save(root / f"{name}.npy", result["logprobs"])
            (root / f"{name}.json").write_text(json.dumps(result["metrics"]))


def test_two_ranks_sharing_prefixes_equal_one_without(tmp_path: Path) -> None:
    checkpoint = tiny_model(tmp_path / "policy")
    layouts: dict[str, dict[str, Any]] = {
        "fsdp": {"data_parallel_shard": 2},
        "tp": {"tensor_parallel": 2},
    }
    unshared = one_step(checkpoint, tree_batch(5), on=False, loss=LOSSES["reference"])
    run_ranks(one_rank, 2, layouts, tmp_path, free_ports(len(layouts)))
    for name in layouts:
        shared = {
            "logprobs": np.load(tmp_path / f"{name}.npy"),
            "metrics": json.loads((tmp_path / f"{name}.json").read_text()),
            "gradients": torch.load(tmp_path / f"{name}.pt"),
        }
        unshared["metrics"]["padding_share"] = shared["metrics"]["padding_share"]
        check_equal(shared, unshared)
