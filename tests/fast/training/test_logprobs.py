"""Logprobs of selected tokens against plain torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import torchtitan_rl.training.logprobs as logprobs_module
from torchtitan_rl.training.logprobs import TaughtRows, selected_logprobs


@pytest.mark.parametrize("chunk_elements", [1 << 24, 40])
def test_selected_logprobs_equal_log_softmax_at_the_sampling_temperature(
    chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 25: the trainer divides logits by the temperature that was sampled at."""
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    temperature = 0.7
    logits = (3 * torch.randn(9, 11)).requires_grad_()
    rows = torch.tensor([0, 0, 1, 2, 2, 2, 3, 5, 6, 7, 8])  # row 4 has no target
    targets = torch.tensor([3, 3, 0, 1, 5, 10, 2, 7, 8, 9, 4])
    upstream = torch.randn(11)
    expected = (logits / temperature).log_softmax(-1)
    (wanted,) = torch.autograd.grad((expected[rows, targets] * upstream).sum(), logits)
    logprobs, entropy, _ = selected_logprobs(logits, targets, rows, temperature=temperature)
    (found,) = torch.autograd.grad((logprobs * upstream).sum(), logits)
    assert torch.allclose(logprobs, expected[rows, targets], atol=1e-6)
    assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1)[rows], atol=1e-5)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert not entropy.requires_grad


@pytest.mark.parametrize("chunk_elements", [1 << 24, 40])
def test_where_tokens_were_cut_logprob_entropy_and_gradient_are_of_the_others(
    chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 25: of what was sampled from, against a dense softmax over it."""
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = (3 * torch.randn(9, 11)).requires_grad_()
    rows, targets = torch.arange(9), torch.randint(0, 11, (9,))
    kept = torch.rand(9, 11) < torch.linspace(0.0, 1.0, 9)[:, None]
    kept[rows, targets] = True
    bits = torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little"))
    upstream = torch.randn(9)
    expected = (logits / 0.7).masked_fill(~kept, -math.inf).log_softmax(-1)
    (wanted,) = torch.autograd.grad((expected[rows, targets] * upstream).sum(), logits)
    logprobs, entropy, _ = selected_logprobs(logits, targets, rows, temperature=0.7, kept_SB=bits)
    (found,) = torch.autograd.grad((logprobs * upstream).sum(), logits)
    assert torch.allclose(logprobs, expected[rows, targets], atol=1e-6)
    dense = -(expected.exp() * expected.masked_fill(~kept, 0.0)).sum(-1)
    assert torch.allclose(entropy, dense, atol=1e-5)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert not found[~kept].any()


@pytest.mark.parametrize("chunk_elements", [1 << 24, 40])
def test_the_kl_to_teachers_and_its_gradient_are_those_of_dense_softmaxes(
    chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two teachers, one with more tokens; rows without one; tokens that were cut; a temperature."""
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = (3 * torch.randn(9, 11)).requires_grad_()
    teachers = [(slice(1, 4), 3 * torch.randn(3, 11)), (slice(4, 9), 3 * torch.randn(5, 13))]
    rows, targets = torch.arange(9), torch.randint(0, 11, (9,))
    kept = torch.rand(9, 11) < torch.linspace(0.5, 1.0, 9)[:, None]
    kept[rows, targets] = True
    bits = torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little"))
    dense = (logits / 0.7).masked_fill(~kept, -math.inf).log_softmax(-1)
    expected = torch.zeros(9)
    for own, of_teacher in teachers:
        finite = dense[own].masked_fill(~kept[own], 0.0)
        expected[own] = (dense[own].exp() * (finite - of_teacher.log_softmax(-1)[:, :11])).sum(-1)
    upstream, of_kl = torch.randn(2, 9)
    total = (dense[rows, targets] * upstream).sum() + (expected * of_kl).sum()
    (wanted,) = torch.autograd.grad(total, logits)
    logprobs, _, kl = selected_logprobs(
        logits,
        targets,
        rows,
        temperature=0.7,
        kept_SB=bits,
        taught=[TaughtRows(own, one.__getitem__) for own, one in teachers],
    )
    (found,) = torch.autograd.grad((logprobs * upstream).sum() + (kl * of_kl).sum(), logits)
    assert torch.allclose(kl, expected, atol=1e-5)
    assert kl[0] == 0.0
    assert torch.allclose(found, wanted, atol=1e-5)


def test_an_equal_teacher_has_no_kl_and_no_gradient() -> None:
    logits = torch.randn(5, 11).requires_grad_()
    taught = [TaughtRows(slice(0, 5), logits.detach().__getitem__)]
    *_, kl = selected_logprobs(logits, torch.arange(5), torch.arange(5), taught=taught)
    (gradient,) = torch.autograd.grad(kl.sum(), logits)
    assert not kl.any()
    assert not gradient.any()


@pytest.mark.parametrize(("vocab_size", "num_ranks"), [(11, 2), (4001, 2), (4001, 4), (10, 4)])
def test_all_ranks_have_the_same_chunks_where_they_split_the_vocabulary_unevenly(
    vocab_size: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", 3 * vocab_size)
    shards = torch.empty(50, vocab_size).chunk(num_ranks, dim=1)  # as DTensor splits
    rows, shard_size = torch.arange(50), shards[0].shape[1]
    first, *others = (logprobs_module._chunks(shard, rows, shard_size, ()) for shard in shards)
    assert shards[-1].shape[1] < shard_size
    assert len(first) > 2
    assert all(chunks == first for chunks in others)
