"""The losses of ``sft``, ``dpo`` and online DPO in the trainer are those of `transformers` and
plain torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.real.models import tiny_model, tiny_tokenizer
from tests.real.trainer_helpers import free_ports, random_batch, run_ranks, trainer
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.rollout.conversation import conversation_to_episodes
from torchtitan_rl.rollout.rendering import make_renderer
from torchtitan_rl.training.batch import PreferenceLoss, TrainingBatch
from torchtitan_rl.training.config import LossConfig, OptimizerConfig
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Episode

SYSTEM = {"role": "system", "content": "Add."}
QUESTIONS = ("1+1?", "2+2?", "1+1?", "3+4?")
ANSWERS = ("2", "It is 4", "two", "7")
WRONG = ("3", "It is 5!", "no", "eight")
BETA = 0.3
ONLINE = LossConfig(surrogate="dpo", dpo_beta=BETA)
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


def online_pairs() -> TrainingBatch:
    """The same pairs as rollouts of four groups; not every group has the chosen one first."""
    batch = pairs()
    signs_E = np.array([1, -1, -1, 1, 1, -1, -1, 1])
    return replace(
        batch,
        advantages=np.float32(signs_E[batch.episode_ids] * batch.loss_mask),
        groups=np.array([3, 3, 0, 0, 2, 2, 1, 1]),
        versions=np.zeros(batch.num_tokens, dtype=np.int64),
    )


def packed(episodes: list[Episode]) -> TrainingBatch:
    batch = pack_episodes(episodes, row_len=128, temperature=0.5).batch
    assert batch is not None
    return batch


def hf_model(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def hf_logprobs(
    model: Any, batch: TrainingBatch, *, temperature: float = 1.0
) -> list[torch.Tensor]:
    """The logprobs of each episode's tokens with loss; each episode alone."""
    found = []
    for start, length in zip(batch.episode_starts, batch.episode_lengths, strict=True):
        tokens = torch.from_numpy(batch.token_ids[start : start + length])
        mask = torch.from_numpy(batch.loss_mask[start + 1 : start + length])
        logprobs = F.log_softmax(model(tokens[None]).logits[0, :-1] / temperature, dim=-1)
        found.append(logprobs.gather(1, tokens[1:, None])[:, 0][mask])
    return found


def hf_dpo(model: Any, batch: TrainingBatch, references: torch.Tensor) -> torch.Tensor:
    sums = torch.stack([one.sum() for one in hf_logprobs(model, batch)])
    ratios = (sums - references).view(-1, 2)
    return -F.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()


def hf_online_ratios(model: Any, reference: Any) -> torch.Tensor:
    """log p - log p_ref [P, 2] of `online_pairs`, the chosen rollout first, in the order of their
    groups' numbers; at the sampling temperature."""
    batch = online_pairs()
    policy, initial = (
        torch.stack([part.sum() for part in hf_logprobs(one, batch, temperature=0.5)])
        for one in (model, reference)
    )
    ratios_E = policy - initial.detach()
    return ratios_E[torch.tensor([[3, 2], [7, 6], [4, 5], [0, 1]])]


def hf_online_dpo(model: Any, reference: Any) -> torch.Tensor:
    ratios_P2 = hf_online_ratios(model, reference)
    return -F.logsigmoid(BETA * (ratios_P2[:, 0] - ratios_P2[:, 1])).mean()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad for name, one in model.named_parameters()}


def step(checkpoint: Path, kind: str, **fields: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A step's metrics, and the gradient that it took."""
    fields = {"max_episode_tokens": 128, "max_tokens_per_microbatch": 1024, **fields}
    if kind == "online":
        fields["loss"] = ONLINE
    with trainer(checkpoint, optimizer=PLAIN, **fields) as policy_trainer:
        before = {name: one.clone() for name, one in policy_trainer.hf_state_dict().items()}
        if kind == "sft":
            output = policy_trainer.supervised_step(demonstrations())
        elif kind == "online":
            output = policy_trainer.train_step(online_pairs())
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
    elif kind == "online":
        loss = hf_online_dpo(model, model)
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


def test_the_loss_and_gradient_of_online_dpo_equal_those_of_transformers(checkpoint: Path) -> None:
    check(step(checkpoint, "online", **LAYOUTS["cut"]), expected(checkpoint, "online"))


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8.0)], ids=["whole", "lora"])
def test_later_steps_of_online_dpo_compare_with_the_initial_policy(
    checkpoint: Path, lora: LoraConfig | None, tmp_path: Path
) -> None:
    batch, fields = online_pairs(), {"max_episode_tokens": 128, "max_tokens_per_microbatch": 128}
    optimizer = OptimizerConfig(learning_rate=1e-2)
    with trainer(checkpoint, optimizer=optimizer, loss=ONLINE, lora=lora, **fields) as policy:
        first = policy.train_step(batch)
        policy.export_hf(tmp_path / "later", dtype="float32")
        second = policy.train_step(batch)
    assert first.metrics["loss"] == pytest.approx(np.log(2), abs=1e-5)
    later, initial = hf_model(tmp_path / "later"), hf_model(checkpoint)
    ratios_P2 = hf_online_ratios(later, initial).detach().numpy()
    margins_P = BETA * (ratios_P2[:, 0] - ratios_P2[:, 1])
    assert np.abs(margins_P).max() > 0.1
    found = second.metrics
    assert found["loss"] == pytest.approx(np.log1p(np.exp(-margins_P)).mean(), abs=1e-4)
    assert found["preference/margin_mean"] == pytest.approx(margins_P.mean(), abs=1e-4)
    assert found["preference/chosen_reward_mean"] == pytest.approx(
        BETA * ratios_P2[:, 0].mean(), abs=1e-4
    )
    assert found["preference/pairs"] == 4
    # -beta sigmoid(-margin) / 4 for each token of the chosen rollouts, the opposite for the others.
    assert second.tokens is not None
    pulls_P = BETA / (1 + np.exp(margins_P)) / 4
    wanted_N = -batch.advantages * pulls_P[batch.groups][batch.episode_ids]
    np.testing.assert_allclose(
        second.tokens.gradients[batch.loss_mask], wanted_N[batch.loss_mask], atol=1e-5
    )


def test_each_update_of_online_dpo_has_whole_pairs_under_its_own_weights(checkpoint: Path) -> None:
    fields = {"max_episode_tokens": 128, "max_tokens_per_microbatch": 128}
    optimizer = OptimizerConfig(learning_rate=1e-2)
    with trainer(
        checkpoint, optimizer=optimizer, loss=ONLINE, updates_per_batch=2, **fields
    ) as policy:
        found = policy.train_step(online_pairs()).metrics
    assert found["preference/pairs"] == 4
    assert found["updates"] == 2
    # The second update starts from what the first one has learned.
    assert found["last_update/loss"] != pytest.approx(np.log(2), abs=1e-3)
    assert found["loss"] == pytest.approx((np.log(2) + found["last_update/loss"]) / 2, abs=1e-5)


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
        result = step(root / "policy", name.partition(" ")[0], **fields)
        if rank == 0:
            torch.save(result, root / f"{name}.pt")


def test_preference_steps_of_two_ranks_equal_transformers(tmp_path: Path) -> None:
    checkpoint = tiny_model(tmp_path / "policy")
    layouts: dict[str, dict[str, Any]] = {
        "dpo fsdp": {"data_parallel_shard": 2, "max_tokens_per_microbatch": 128},
        "dpo tp": {"tensor_parallel": 2},
        "online fsdp": {"data_parallel_shard": 2, "max_tokens_per_microbatch": 128},
    }
    run_ranks(one_rank, 2, layouts, tmp_path, free_ports(len(layouts)))
    for name in layouts:
        wanted = expected(checkpoint, name.partition(" ")[0])
        check(torch.load(tmp_path / f"{name}.pt", weights_only=False), wanted)
