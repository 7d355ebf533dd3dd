"""The losses of ``sft`` and ``dpo`` in the trainer are those of `transformers` and plain torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.real.models import tiny_model, tiny_tokenizer
from tests.real.trainer_helpers import free_ports, random_batch, run_ranks, trainer
from torchtitan_rl.rollout.conversation import conversation_to_episodes
from torchtitan_rl.rollout.rendering import make_renderer
from torchtitan_rl.training.batch import PreferenceLoss, TrainingBatch
from torchtitan_rl.training.config import OptimizerConfig
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Episode

SYSTEM = {"role": "system", "content": "Add."}
QUESTIONS = ("1+1?", "2+2?", "1+1?", "3+4?")
ANSWERS = ("2", "It is 4", "two", "7")
WRONG = ("3", "It is 5!", "no", "eight")
BETA = 0.3
SCALE = 1e6  # with an epsilon far above the gradient, AdamW's first step is a multiple of it
PLAIN = OptimizerConfig(learning_rate=SCALE * SCALE, eps=SCALE, max_grad_norm=1e9)


def episode(question: str, answer: str) -> Episode:
    conversation = [
        SYSTEM,
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": f"{answer}."},
    ]
    renderer = make_renderer(tiny_tokenizer(), kind="chatml")
    name = f"{question} {answer}"
    (made,) = conversation_to_episodes(name, conversation, renderer=renderer)
    return made


def demonstrations() -> TrainingBatch:
    episodes = [episode(*pair) for pair in zip(QUESTIONS, ANSWERS, strict=True)]
    return packed(episodes)


def pairs() -> TrainingBatch:
    episodes = [
        episode(question, answer)
        for question, *both in zip(QUESTIONS, ANSWERS, WRONG, strict=True)
        for answer in both
    ]
    return packed(episodes)


def packed(episodes: list[Episode]) -> TrainingBatch:
    batch = pack_episodes(episodes, row_len=128, temperature=0.5).batch
    assert batch is not None
    return batch


def hf_model(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def hf_logprobs(model: Any, batch: TrainingBatch) -> list[torch.Tensor]:
    """The logprobs of each episode's tokens with loss; each episode alone."""
    found = []
    for start, length in zip(batch.episode_starts, batch.episode_lengths, strict=True):
        tokens = torch.from_numpy(batch.token_ids[start : start + length])
        mask = torch.from_numpy(batch.loss_mask[start + 1 : start + length])
        logprobs = F.log_softmax(model(tokens[None]).logits[0, :-1], dim=-1)
        found.append(logprobs.gather(1, tokens[1:, None])[:, 0][mask])
    return found


def hf_dpo(model: Any, batch: TrainingBatch, references: torch.Tensor) -> torch.Tensor:
    sums = torch.stack([one.sum() for one in hf_logprobs(model, batch)])
    ratios = (sums - references).view(-1, 2)
    return -F.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad for name, one in model.named_parameters()}


def step(checkpoint: Path, kind: str, **fields: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A step's metrics, and the gradient that it took."""
    fields = {"max_episode_tokens": 128, "max_tokens_per_microbatch": 1024, **fields}
    with trainer(checkpoint, optimizer=PLAIN, **fields) as policy_trainer:
        before = {name: one.clone() for name, one in policy_trainer.hf_state_dict().items()}
        if kind == "sft":
            output = policy_trainer.supervised_step(demonstrations())
        else:
            references = np.linspace(-60.0, -90.0, pairs().num_episodes)
            output = policy_trainer.preference_step(
                pairs(), PreferenceLoss(beta=BETA, references=references)
            )
        after = policy_trainer.hf_state_dict()
        return output.metrics, {name: (before[name] - after[name]) / SCALE for name in before}


def expected(checkpoint: Path, kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    model = hf_model(checkpoint)
    if kind == "sft":
        loss = -torch.cat(hf_logprobs(model, demonstrations())).mean()
    else:
        references = torch.from_numpy(np.linspace(-60.0, -90.0, pairs().num_episodes)).float()
        loss = hf_dpo(model, pairs(), references)
    return loss.item(), gradients(model, loss)


def check(found: tuple[Any, dict[str, torch.Tensor]], wanted: tuple[float, Any]) -> None:
    (metrics, gradient), (loss, wanted_gradient) = found, wanted
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    for name, tensor in wanted_gradient.items():
        largest = float(tensor.abs().max())
        assert largest > 0.0, name
        torch.testing.assert_close(gradient[name], tensor, rtol=1e-5, atol=1e-5 * largest)


LAYOUTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "unshared": {"share_prefixes": False},
    "cut": {"max_tokens_per_microbatch": 128},
}


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_equal_those_of_transformers(
    checkpoint: Path, kind: str, layout: str
) -> None:
    found = step(checkpoint, kind, **LAYOUTS[layout])
    check(found, expected(checkpoint, kind))
    assert (found[0]["shared_share"] > 0.1) is (layout != "unshared")


def test_the_first_preference_step_has_no_margin_and_the_next_ones_prefer_the_chosen(
    checkpoint: Path,
) -> None:
    batch = pairs()
    fields = {"max_episode_tokens": 128, "max_tokens_per_microbatch": 1024}
    with trainer(checkpoint, optimizer=OptimizerConfig(learning_rate=1e-3), **fields) as policy:
        found = hf_logprobs(hf_model(checkpoint), batch)  # at temperature 1, unlike the batch
        sums = np.array([one.sum().item() for one in found])
        loss = PreferenceLoss(beta=BETA, references=sums)
        first, *others = [policy.preference_step(batch, loss).metrics for _ in range(6)]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert first["preference/margin_mean"] == pytest.approx(0.0, abs=1e-5)
    assert others[-1]["preference/accuracy"] == 1.0
    assert others[-1]["preference/margin_mean"] > 0.1
    assert others[-1]["loss"] < first["loss"]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_supervised_loss_is_added_to_that_of_reinforcement_learning(
    checkpoint: Path, updates: int
) -> None:
    batch, examples = random_batch(), demonstrations()
    found = {}
    for coefficient in (0.0, 0.3):
        with trainer(
            checkpoint,
            optimizer=PLAIN if updates == 1 else OptimizerConfig(learning_rate=1e-9),
            max_episode_tokens=128,
            max_tokens_per_microbatch=128,
            updates_per_batch=updates,
            sft_coefficient=coefficient,
        ) as policy_trainer:
            before = {name: one.clone() for name, one in policy_trainer.hf_state_dict().items()}
            mixed = examples if coefficient else None
            metrics = policy_trainer.train_step(batch, examples=mixed).metrics
            after = policy_trainer.hf_state_dict()
            gradient = {name: (before[name] - after[name]) / SCALE for name in before}
        found[coefficient] = metrics, gradient
    (alone, of_policy), (metrics, of_both) = found[0.0], found[0.3]
    assert "sft_loss" not in alone
    assert metrics["sft_tokens"] == examples.loss_mask.sum()
    assert metrics["loss"] == pytest.approx(alone["loss"] + 0.3 * metrics["sft_loss"], abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(alone["ratio_mean"], rel=1e-6)
    if updates == 1:
        sft_loss, of_examples = expected(checkpoint, "sft")
        assert metrics["sft_loss"] == pytest.approx(sft_loss, abs=1e-5)
        for name, tensor in of_examples.items():
            wanted = of_policy[name] + 0.3 * tensor
            largest = float(wanted.abs().max())
            torch.testing.assert_close(of_both[name], wanted, rtol=1e-5, atol=1e-5 * largest)


def one_rank(rank: int, layouts: dict[str, dict[str, Any]], root: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    for (name, fields), port in zip(layouts.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        result = step(root / "policy", "dpo", **fields)
        if rank == 0:
            torch.save(result, root / f"{name}.pt")


def test_preference_steps_of_two_ranks_equal_transformers(tmp_path: Path) -> None:
    checkpoint = tiny_model(tmp_path / "policy")
    layouts: dict[str, dict[str, Any]] = {
        "fsdp": {"data_parallel_shard": 2, "max_tokens_per_microbatch": 128},
        "tp": {"tensor_parallel": 2},
    }
    run_ranks(one_rank, 2, layouts, tmp_path, free_ports(len(layouts)))
    wanted = expected(checkpoint, "dpo")
    for name in layouts:
        check(torch.load(tmp_path / f"{name}.pt", weights_only=False), wanted)
