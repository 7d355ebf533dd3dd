"""The policy step's objective in one process: the proximal policy and the reference model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.real.image_policies import image_policy
from tests.real.models import VOCAB_SIZE, hf_logprob_rows, tiny_model
from tests.real.trainer_helpers import random_batch, trainer
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_bits
from torchtitan_rl.training.batch import TrainingBatch, trained_mask
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
    """And the teachers, which are not in the checkpoint either."""
    loss = LossConfig(kl_coefficient=0.1)
    teachers = [tiny_model(tmp_path / "teacher", seed=5)]
    batches = [
        replace(one, teachers=np.zeros(one.num_episodes, np.int64), teacher_coefficient=0.5)
        for one in (random_batch(seed=seed) for seed in range(3))
    ]
    with trainer(checkpoint, loss=loss, teachers=teachers) as policy_trainer:
        steps = [policy_trainer.train_step(batch).metrics for batch in batches[:2]]
        trained = policy_trainer.logprobs(batches[2])
        policy_trainer.save_checkpoint(tmp_path / "step-000002", {})
        steps.append(policy_trainer.train_step(batches[2]).metrics)
    with trainer(checkpoint, loss=loss, teachers=teachers) as policy_trainer:
        initial = policy_trainer.logprobs(batches[2])
        policy_trainer.load_checkpoint(tmp_path / "step-000002")
        resumed = policy_trainer.train_step(batches[2]).metrics
    assert steps[0]["kl_reference"] == 0.0
    difference = (initial - trained)[batches[2].loss_mask].astype(np.float64)
    expected = (np.exp(difference) - 1.0 - difference).mean()
    assert expected > 1e-3
    assert resumed["kl_reference"] == pytest.approx(expected, rel=1e-4)
    assert resumed["kl_reference"] == steps[2]["kl_reference"]
    assert resumed["kl_teacher"] == steps[2]["kl_teacher"] > 0.1
    assert resumed["loss"] == steps[2]["loss"]


def test_the_kl_over_a_teachers_likely_tokens_is_that_of_transformers_and_falls(
    checkpoint: Path, tmp_path: Path
) -> None:
    tiny_model(tmp_path / "teacher", seed=5)
    batch = replace(random_batch(temperature=1.0), teacher_coefficient=1.0)
    batch = replace(batch, advantages=np.zeros_like(batch.advantages))
    teacher_NV, own_NV = (
        np.concatenate(
            [
                np.roll(hf_logprob_rows(path, tuple(tokens.tolist())), 1, axis=0)
                for tokens in np.split(batch.token_ids, batch.episode_starts[1:])
            ]
        )
        for path in (tmp_path / "teacher", checkpoint)
    )
    ids_NK = np.argsort(-teacher_NV, axis=1)[:, :8]
    q_NK, p_NK = (np.exp(np.take_along_axis(of_NV, ids_NK, 1)) for of_NV in (teacher_NV, own_NV))
    q_N, p_N = 1.0 - q_NK.sum(1), 1.0 - p_NK.sum(1)
    kl_N = (q_NK * np.log(q_NK / p_NK)).sum(1) + q_N * np.log(q_N / p_N)
    taught = replace(
        batch,
        teacher_ids=ids_NK.astype(np.int32),
        teacher_logprobs=np.take_along_axis(teacher_NV, ids_NK, 1),
    )
    with trainer(checkpoint) as policy_trainer:
        steps = [policy_trainer.train_step(taught).metrics for _ in range(3)]
    expected = kl_N[trained_mask(batch)].mean()
    assert steps[0]["kl_teacher"] == pytest.approx(expected, rel=1e-4)
    assert steps[0]["loss"] == pytest.approx(expected, rel=1e-4)
    assert steps[2]["kl_teacher"] < steps[1]["kl_teacher"] < steps[0]["kl_teacher"]


def taught_by_transformers(
    batch: TrainingBatch, checkpoint: Path, teachers: list[Path]
) -> tuple[float, float]:
    """The mean KL of the policy to the episodes' teachers, and the norm of its gradient."""
    from transformers import AutoModelForCausalLM

    models = [
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
        for one in (checkpoint, *teachers)
    ]
    assert batch.kept is not None
    assert batch.teachers is not None
    total, trained_N = torch.zeros(()), torch.from_numpy(trained_mask(batch))
    for number, start, length in zip(
        batch.teachers, batch.episode_starts, batch.episode_lengths, strict=True
    ):
        own = slice(start, start + length)
        tokens = torch.from_numpy(batch.token_ids[own])[None]
        sets = [WHOLE_VOCABULARY if one < 0 else batch.kept_sets[one] for one in batch.kept[own]]
        bits = np.unpackbits(kept_bits(sets, VOCAB_SIZE), axis=1, bitorder="little")
        is_kept = torch.from_numpy(bits[1:, :VOCAB_SIZE]) == 1
        logits = models[0](tokens).logits[0, :-1] / batch.temperature
        own_LV = logits.masked_fill(~is_kept, -torch.inf).log_softmax(-1)
        if number >= 0:
            with torch.no_grad():
                teacher_LV = models[1 + number](tokens).logits[0, :-1].log_softmax(-1)
            finite_LV = own_LV.masked_fill(~is_kept, 0.0)
            terms_L = (own_LV.exp() * (finite_LV - teacher_LV)).sum(-1)
            total = total + terms_L[trained_N[own][1:]].sum()
    mean = total / trained_N.sum()
    mean.backward()
    norms = [one.grad.norm() for one in models[0].parameters() if one.grad is not None]
    return mean.item(), torch.stack(norms).norm().item()


def test_the_kl_to_teachers_in_the_trainer_and_its_gradient_are_those_of_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Of a deeper and wider teacher without tied embeddings, and of the policy itself, on shared
    prefixes, at another temperature, where tokens were cut."""
    deep = tiny_model(tmp_path / "deep", tied=False, seed=3, hidden_size=96, num_layers=3)
    teachers = [deep, checkpoint]
    batch = random_batch(cuts_tokens=True)
    for offset in range(3):  # before the first sampled token
        batch.token_ids[batch.episode_starts + offset] = offset
    batch = replace(
        batch,
        advantages=np.zeros_like(batch.advantages),
        teachers=np.arange(batch.num_episodes) % 3 - 1,
        teacher_coefficient=2.0,
    )
    kl, gradient = taught_by_transformers(batch, checkpoint, teachers)
    for lora in (None, LoraConfig(rank=4)):
        with trainer(checkpoint, teachers=teachers, lora=lora) as policy_trainer:
            found = policy_trainer.train_step(batch).metrics
        assert found["shared_share"] > 0
        assert found["kl_teacher"] == pytest.approx(kl, rel=1e-5)
        assert found["loss"] == pytest.approx(2.0 * kl, rel=1e-5)
        if lora is None:
            assert found["grad_norm"] == pytest.approx(2.0 * gradient, rel=1e-4)


def test_the_policy_as_its_own_teacher_has_no_loss_and_no_gradient(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Also one that takes images."""
    batch = random_batch(temperature=1.0)
    batch = replace(
        batch,
        advantages=np.zeros_like(batch.advantages),
        teachers=np.zeros(batch.num_episodes, np.int64),
        teacher_coefficient=1.0,
    )
    for policy in (checkpoint, image_policy(tmp_path)):
        with trainer(policy, teachers=[policy]) as policy_trainer:
            found = policy_trainer.train_step(batch).metrics
        assert abs(found["loss"]) < 1e-6
        assert found["grad_norm"] < 1e-6
