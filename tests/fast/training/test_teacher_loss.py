"""The KL over a teacher's most likely tokens: its value, its gradient, its part of the loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.loss_tokens import make_tokens, totals_of
from tests.support.turns import rollout, turn
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses.policy import policy_loss
from torchtitan_rl.training.losses.teacher import add_teacher, teacher_kl
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import TokenScores

V = 16


def distributions(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the policy (with a gradient) and logprobs of the teacher, [5, V]."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV, teacher_TV = torch.randn(2, 5, V, generator=generator).unbind(0)
    return (2 * logits_TV).requires_grad_(), (2 * teacher_TV).log_softmax(-1)


def of_top(logits_TV: torch.Tensor, teacher_TV: torch.Tensor, k: int) -> torch.Tensor:
    top_TK, ids_TK = teacher_TV.topk(k, dim=-1)
    logprobs_TK = logits_TV.log_softmax(-1).gather(1, ids_TK)
    return teacher_kl(logprobs_TK, top_TK, torch.ones(len(logits_TV), dtype=torch.bool))


def whole(logits_TV: torch.Tensor, teacher_TV: torch.Tensor) -> torch.Tensor:
    return (teacher_TV.exp() * (teacher_TV - logits_TV.log_softmax(-1))).sum(-1)


def test_all_tokens_give_the_whole_kl_and_its_gradient() -> None:
    logits_TV, teacher_TV = distributions()
    expected_T = whole(logits_TV, teacher_TV)
    found_T = of_top(logits_TV, teacher_TV, V - 1)  # the rest is one token
    assert torch.allclose(found_T, expected_T, atol=1e-5)
    (expected,) = torch.autograd.grad(expected_T.sum(), logits_TV)
    (found,) = torch.autograd.grad(found_T.sum(), logits_TV)
    assert torch.allclose(found, expected, atol=1e-4)


def test_fewer_tokens_give_a_lower_bound_that_is_never_negative() -> None:
    logits_TV, teacher_TV = distributions(1)
    kl_KT = torch.stack([of_top(logits_TV, teacher_TV, k) for k in range(1, V)])
    assert (kl_KT > 0).all()
    assert (kl_KT.diff(dim=0) > -1e-5).all()
    assert (kl_KT[-1] <= whole(logits_TV, teacher_TV) + 1e-5).all()


def test_an_equal_policy_has_no_kl_and_no_gradient() -> None:
    _, teacher_TV = distributions(2)
    logits_TV = teacher_TV.clone().requires_grad_()
    for k in (1, 4, V - 1):
        kl_T = of_top(logits_TV, teacher_TV, k)
        assert torch.allclose(kl_T, torch.zeros(5), atol=1e-5)
        (gradient,) = torch.autograd.grad(kl_T.sum(), logits_TV)
        assert torch.allclose(gradient, torch.zeros(5, V), atol=1e-5)


def test_probability_that_leaves_the_teachers_tokens_is_drawn_back() -> None:
    """Without the rest as a token of its own, the loss would be lowered by such a move."""
    teacher = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    policy = torch.tensor([[0.3, 0.2, 0.4, 0.1]]).log().requires_grad_()
    (gradient,) = torch.autograd.grad(of_top(policy, teacher, 2).sum(), policy)
    assert gradient[0, 2] > 0 > gradient[0, 0]


def test_tokens_that_are_unknown_have_no_part_and_no_gradient() -> None:
    logprobs_TK = torch.tensor([[-1.0], [-math.inf], [-1.0]]).requires_grad_()
    teacher_TK = torch.tensor([[math.nan], [-0.5], [-0.5]])
    kl_T = teacher_kl(logprobs_TK, teacher_TK, torch.tensor([True, False, True]))
    (gradient,) = torch.autograd.grad(kl_T.sum(), logprobs_TK)
    assert kl_T[:2].tolist() == [0.0, 0.0]
    assert gradient[:2].tolist() == [[0.0], [0.0]]
    assert kl_T[2] > 0
    assert gradient[2, 0] < 0


def test_the_teachers_part_is_aggregated_as_the_loss_is() -> None:
    tokens = make_tokens([1.0, 1.1, 0.9, 1.0], [1.0, -1.0, 1.0, 1.0], sequences=[0, 0, 0, 1])
    totals, kl_T = totals_of(tokens), torch.tensor([1.0, 2.0, 3.0, 5.0])
    for aggregation, expected in (("token_mean", 11 / 4), ("sequence_mean", (2 + 5) / 2)):
        config = LossConfig(aggregation=aggregation)  # type: ignore[arg-type]
        before = policy_loss(tokens, totals=totals, config=config)
        after = add_teacher(before, tokens, kl_T, coefficient=2.0, totals=totals, config=config)
        assert (after.loss - before.loss).item() == pytest.approx(2 * expected)
        assert after.sums["kl_teacher"].item() == 11.0
        assert after.terms_T is not None
        assert after.terms_T.sum().item() == pytest.approx(after.loss.item())


def test_a_batch_has_the_teachers_tokens_where_it_scored() -> None:
    scores = TokenScores(
        logprobs=(-1.0, -2.0),
        top_ids=np.array([[7, 8], [9, 1]], dtype="<i4").tobytes(),
        top_logprobs=np.array([[-0.5, -1.5], [-0.25, -2.0]], dtype="<f4").tobytes(),
    )
    taught = rollout(turn([1, 2], [3, 4], teacher=scores), turn([1, 2, 3, 4, 5], [6]))
    others = rollout(turn([1], [2]), rollout_id="g/r1")
    episodes = [*rollout_to_episodes(others, 0.0), *rollout_to_episodes(taught, 0.0)]
    batch = pack_episodes(episodes, row_len=8, temperature=1.0, num_top=2).batch
    assert batch is not None
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    known_N = np.isfinite(batch.teacher_logprobs).all(axis=1)
    assert known_N.tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert batch.teacher_ids[known_N].tolist() == [[7, 8], [9, 1]]
    assert batch.teacher_logprobs[known_N].tolist() == [[-0.5, -1.5], [-0.25, -2.0]]
