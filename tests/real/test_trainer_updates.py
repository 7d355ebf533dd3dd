"""Several optimizer updates of a step, against a plain PyTorch loop; what a failed one leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.real.models import tiny_model
from tests.real.trainer_helpers import (
    CONFIG,
    MAX_STEPS,
    free_ports,
    random_batch,
    run_ranks,
    trainer,
)
from torchtitan_rl.errors import DivergedError
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.packing import minibatches

UPDATES = 3
LOSSES = {
    "behaviour": LossConfig(clip_low=0.9, clip_high=2.0),
    "recomputed": LossConfig(
        clip_low=1e-3, clip_high=1e-3, proximal_policy="recomputed", importance_weight="token"
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"data_parallel_shard": 2},
    "tp": {"tensor_parallel": 2},
    "hsdp": {"data_parallel_replicate": 2},
}


def batches() -> list[TrainingBatch]:
    """Without the padding token, whose embedding `transformers` does not train."""
    return [
        random_batch(seed=1, vocab_size=256),
        random_batch(seed=2, vocab_size=256, num_episodes=7),
    ]


def take_steps(checkpoint: Path, folder: Path, ports: list[int], **fields: Any) -> None:
    """Two steps with each loss."""
    for (name, loss), port in zip(LOSSES.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with trainer(checkpoint, loss=loss, updates_per_batch=UPDATES, **fields) as policy_trainer:
            metrics = [policy_trainer.train_step(batch).metrics for batch in batches()]
            weights = policy_trainer.hf_state_dict()
            assert policy_trainer.version == 2
        if int(os.environ.get("RANK", "0")) == 0:
            torch.save(weights, folder / f"{name}.pt")
            (folder / f"{name}.json").write_text(json.dumps(metrics))


def one_rank(rank: int, checkpoint: Path, root: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    for index, (name, fields) in enumerate(LAYOUTS.items()):
        own = ports[len(LOSSES) * index : len(LOSSES) * (index + 1)]
        take_steps(checkpoint, root / name, own, **fields)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("updates")
    checkpoint = tiny_model(root / "policy")
    for name in ("one", *LAYOUTS):
        (root / name).mkdir()
    take_steps(checkpoint, root / "one", [0] * len(LOSSES))
    run_ranks(one_rank, 2, checkpoint, root, free_ports(len(LAYOUTS) * len(LOSSES)))
    return root


def plain_steps(
    checkpoint: Path, loss: LossConfig
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights and metrics of the same steps, in PyTorch and `transformers` alone."""
    from transformers import AutoModelForCausalLM

    optimizer_config, seed = CONFIG.optimizer, 0
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    metrics = []
    for step, batch in enumerate(batches()):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * optimizer_config.learning_rate_factor(step, MAX_STEPS)
        with torch.no_grad():
            before = logprobs_of(model, batch)
        order = np.random.default_rng((seed, step)).permutation(4)
        losses, norms, distances = [], [], []
        for groups in np.array_split(order, UPDATES):
            chosen = batch.loss_mask & np.isin(batch.groups, groups)[batch.episode_ids]
            now, mask = logprobs_of(model, batch), torch.from_numpy(chosen)
            behaviour = torch.from_numpy(batch.logprobs)
            advantages = torch.from_numpy(batch.advantages)
            anchor = behaviour if loss.proximal_policy == "behaviour" else before
            weight = (anchor - behaviour).exp().clamp_max(loss.importance_weight_cap)
            ratio = (now - anchor).exp()
            clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
            terms = weight * torch.minimum(ratio * advantages, clipped * advantages)
            value = -terms[mask].mean()
            value.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            losses.append(value.item())
            distances.append((now - behaviour).abs()[mask].mean().item())
            optimizer.step()
            optimizer.zero_grad()
        metrics.append(
            {
                "loss": float(np.mean(losses)),
                "grad_norm": float(np.mean(norms)),
                "logprob_diff_mean": distances[0],
                f"age_{step}/logprob_diff_mean": distances[0],
                "last_update/loss": losses[-1],
                "last_update/grad_norm": norms[-1],
                "last_update/ratio_mean": (now - behaviour).exp()[mask].mean().item(),
            }
        )
    return {name: value.detach() for name, value in model.named_parameters()}, metrics


def logprobs_of(model: Any, batch: TrainingBatch) -> torch.Tensor:
    """[N]: each episode alone; 0 on first tokens."""
    parts = []
    for start, length in zip(batch.episode_starts, batch.episode_lengths, strict=True):
        tokens = torch.from_numpy(batch.token_ids[start : start + length])
        logits = model(tokens[None]).logits[0] / batch.temperature
        chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        parts.append(torch.cat([torch.zeros(1), chosen]))
    return torch.cat(parts)


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
@pytest.mark.parametrize("name", LOSSES)
def test_several_updates_are_those_of_a_plain_loop_on_any_layout(
    name: str, layout: str, results: Path
) -> None:
    """Each has a minibatch of whole groups, is normalized by it, clipped, and has the step's
    learning rate."""
    weights, expected = plain_steps(results / "policy", LOSSES[name])
    found = json.loads((results / layout / f"{name}.json").read_text())
    for step, plain in zip(found, expected, strict=True):
        assert step["updates"] == UPDATES
        for metric, value in plain.items():
            assert step[metric] == pytest.approx(value, rel=2e-3, abs=1e-4), metric
    for tensor_name, tensor in torch.load(results / layout / f"{name}.pt").items():
        # Adam turns rounding in a gradient near 0 into a part of a step of 1e-3.
        torch.testing.assert_close(tensor, weights[tensor_name], atol=2e-4, rtol=0)


def test_a_later_update_clips_against_the_weights_before_the_step(results: Path) -> None:
    steps = json.loads((results / "one" / "recomputed.json").read_text())
    assert all(step["last_update/clip_share"] > step["clip_share"] > 0.0 for step in steps)


def test_a_resumed_run_takes_the_same_minibatches_bit_for_bit(
    checkpoint: Path, tmp_path: Path
) -> None:
    first, second = batches()
    with trainer(checkpoint, updates_per_batch=2) as policy_trainer:
        policy_trainer.train_step(first)
        policy_trainer.save_checkpoint(tmp_path / "step-000001", {})
        policy_trainer.train_step(second)
        expected = {k: v.clone() for k, v in policy_trainer.hf_state_dict().items()}
    with trainer(checkpoint, updates_per_batch=2) as policy_trainer:
        policy_trainer.load_checkpoint(tmp_path / "step-000001")
        policy_trainer.train_step(second)
        found = policy_trainer.hf_state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_between_two_updates_are_neither_published_nor_saved(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The second update diverges after the first has changed the weights."""
    good, bad = batches()
    _, second = minibatches(bad, bad.loss_mask, 2, seed=(0, 1))
    bad.advantages[np.nonzero(second)[0][0]] = np.nan
    with trainer(checkpoint, updates_per_batch=2) as policy_trainer:
        policy_trainer.train_step(good)
        policy_trainer.save_checkpoint(tmp_path / "step-000001", {})
        policy_trainer.finish_checkpoint()
        expected = {k: v.clone() for k, v in policy_trainer.hf_state_dict().items()}
        with pytest.raises(DivergedError, match=r"loss is nan .*version 1; .*earlier ones"):
            policy_trainer.train_step(bad)
        for method, arguments in {
            "train_step": (good,),
            "logprobs": (good,),
            "hf_state_dict": (),
            "hf_parts": (),
            "export_hf": (tmp_path / "exported",),
            "save_checkpoint": (tmp_path / "step-000002", {}),
        }.items():
            with pytest.raises(DivergedError, match="resume from a checkpoint"):
                getattr(policy_trainer, method)(*arguments)
        policy_trainer.load_checkpoint(tmp_path / "step-000001")
        found = policy_trainer.hf_state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
