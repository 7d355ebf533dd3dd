"""Losses: pure functions of ``[T]`` tensors, without a model or a process group.

Invariants: a loss is a sum over trained tokens, divided by totals of the *whole* optimizer step. So
the losses (and gradients) of microbatches and ranks add up to the same sum for any split that does
not split a sequence. Values where ``trained_T`` is False are never read, NaN included.

Published methods are combinations of `LossConfig`'s options. The example applies each method to
four tokens of age 2 and advantage 1, whose ratios policy / behaviour are 2, 1.1, 0.3 and 1; the
first two tokens are one sequence. Each column is a token, and shows how much the step raises the
token's logprob (minus the gradient). The value is 0.00 if the method clips or masks the token.

>>> import torch
>>> from torchtitan_rl.training.config import LossConfig
>>> methods = {
...     "GRPO": LossConfig(clip_high=0.2, aggregation="sequence_mean", kl_coefficient=0.04),
...     "DAPO": LossConfig(clip_high=0.28, aggregation="token_mean"),  # the defaults
...     "Dr. GRPO": LossConfig(clip_high=0.2, aggregation="constant", constant_length=2),
...     "GSPO": LossConfig(
...         ratio="sequence", aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4
...     ),
...     "CISPO": LossConfig(surrogate="cispo", clip_low=0.99),
...     "TIS": LossConfig(proximal_policy="recomputed", importance_weight="token"),
...     "IcePop": LossConfig(
...         proximal_policy="recomputed",
...         importance_weight="token",
...         importance_weight_cap=5.0,
...         mask="token",
...     ),
...     "geometric mask": LossConfig(mask="geometric", mask_low=0.9, mask_high=1.1),
...     "A-3PO": LossConfig(proximal_policy="interpolated", importance_weight="token"),
... }
>>> for name, config in methods.items():
...     tokens = LossTokens(
...         logprobs_T=torch.tensor([2.0, 1.1, 0.3, 1.0]).log().requires_grad_(),
...         behaviour_T=torch.zeros(4),
...         advantages_T=torch.ones(4),
...         trained_T=torch.ones(4, dtype=torch.bool),
...         ages_T=torch.full((4,), 2),
...         sequences_T=torch.tensor([0, 0, 1, 2]),
...         reference_T=torch.zeros(4),
...     )
...     totals = StepTotals(num_tokens=4, num_sequences=3)
...     policy_loss(tokens, totals=totals, config=config).loss.backward()
...     print(f"{name:14}", *(f"{-gradient:z.2f}" for gradient in tokens.logprobs_T.grad))
GRPO           0.00 0.18 0.13 0.33
DAPO           0.00 0.28 0.07 0.25
Dr. GRPO       0.00 0.18 0.05 0.17
GSPO           0.00 0.00 0.10 0.33
CISPO          0.32 0.28 0.07 0.25
TIS            0.50 0.28 0.07 0.25
IcePop         0.50 0.28 0.00 0.25
geometric mask 0.00 0.00 0.00 0.25
A-3PO          0.00 0.27 0.08 0.25

``rollout.advantage`` is a part of some methods: ``std`` in GRPO, ``mean`` in Dr. GRPO. `policy.py`
names the papers; combinations that are refused are in `config/checks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from torchtitan_rl.errors import one_line
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses.metrics import (
    LossOutput,
    LossTokens,
    StepTotals,
    cross_entropy_loss,
    loss_metrics,
)
from torchtitan_rl.training.losses.policy import policy_loss

__all__ = [
    "LossOutput",
    "LossTokens",
    "StepTotals",
    "cross_entropy_loss",
    "loss_metrics",
    "policy_loss",
]


LossFunction = Callable[..., LossOutput]
"""``function(tokens: LossTokens, *, totals: StepTotals, config: LossConfig) -> LossOutput``"""

_PARTS = ((0, 1, 2), (3, 4, 5, 6), (7,))  # tokens of sequences 0 / 1, 2 / 3 (untrained)


def loss_problem(function: LossFunction, config: LossConfig, updates: int) -> str | None:
    """Check a loss function on a few tokens. Returns how it breaks the contract, or None.

    All tokens together and the same tokens in parts must give the same loss, gradient, sums and
    maxima. Values of untrained tokens must not be read.
    """
    try:
        return _problem(function, config, _made_tokens(config, updates))
    except (Exception, SystemExit) as error:
        cause = one_line(error)
        return f"it fails on a few made tokens ({cause})"


def _problem(function: LossFunction, config: LossConfig, tokens: LossTokens) -> str | None:
    whole, gradient_T = _call(function, tokens, config)
    usual, _ = _call(policy_loss, tokens, config)
    if whole.terms_T is not None and whole.terms_T.shape != gradient_T.shape:
        return f"terms_T has the shape {tuple(whole.terms_T.shape)}: give each token's part"
    parts = [_call(function, _part(tokens, part), config) for part in _PARTS]
    if not whole.loss.isfinite() or not gradient_T.isfinite().all():
        return (
            f"loss {whole.loss.item()}, gradient {gradient_T.tolist()}: read nothing where "
            "trained_T is False (LossTokens.cleaned sets it to 0)"
        )
    if not _is_sum(whole.loss, [part.loss for part, _ in parts]) or not torch.allclose(
        gradient_T, torch.cat([gradient for _, gradient in parts]), atol=1e-6
    ):
        return (
            f"the losses of parts add up to {sum(part.loss.item() for part, _ in parts)}, that of "
            f"the whole is {whole.loss.item()}: sum over the part's trained tokens, and divide by "
            "totals; draw nothing at random"
        )
    return _metrics_problem(whole, [part for part, _ in parts], usual)


def _metrics_problem(
    whole: LossOutput, parts: Sequence[LossOutput], usual: LossOutput
) -> str | None:
    for name in ("sums", "maxima"):
        values, known = getattr(whole, name), getattr(usual, name)
        others = [getattr(part, name) for part in parts]
        if any(other.keys() != values.keys() for other in others):
            return f"{name} has other names for a part: give all of them each time"
        if wrong := [one for one in values if not one.startswith("own/") and one not in known]:
            return f"{name} has {wrong[0]!r}: begin the names of your metrics with own/"
        for one, value in values.items():
            if value.requires_grad or any(other[one].shape != value.shape for other in others):
                return f"{name}[{one!r}]: give detached tensors that have one shape for all parts"
    for one in usual.sums.keys() & usual.maxima.keys():
        if (one in whole.sums) != (one in whole.maxima):
            return f"sums and maxima of policy_loss have {one!r}: return both, or neither"
    for one, value in whole.sums.items():
        if not _is_sum(value, [part.sums[one] for part in parts]):
            return f"sums[{one!r}] of parts do not add up to that of the whole"
    return None


def _call(
    function: LossFunction, tokens: LossTokens, config: LossConfig
) -> tuple[LossOutput, torch.Tensor]:
    totals = StepTotals(num_tokens=6, num_sequences=3)
    output = function(tokens, totals=totals, config=config)
    if not isinstance(output, LossOutput):
        raise TypeError(f"it returned a {type(output).__name__}, no LossOutput")
    for name in ("sums", "maxima"):
        for one, value in dict(getattr(output, name)).items():
            if not isinstance(one, str) or not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} has {one!r}: {value!r}, no tensor by its name")
    if output.loss.shape != () or not output.loss.requires_grad:
        raise ValueError("LossOutput.loss is no scalar that depends on logprobs_T")
    (gradient_T,) = torch.autograd.grad(output.loss, tokens.logprobs_T)
    return output, gradient_T


def _is_sum(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    return torch.allclose(whole, torch.stack(list(parts)).sum(0).to(whole.dtype), atol=1e-5)


def _made_tokens(config: LossConfig, updates: int) -> LossTokens:
    """Make eight tokens of four sequences, two of them untrained, as a run would."""
    generator = torch.Generator().manual_seed(0)
    logprobs_T = -3 * torch.rand(8, generator=generator)
    trained_T = torch.tensor([True, True, False, True, True, True, True, False])

    is_anchored = updates > 1 and config.proximal_policy != "behaviour"

    def near(spread: float) -> torch.Tensor:
        values_T = logprobs_T + spread * torch.randn(8, generator=generator)
        return torch.where(trained_T, values_T, torch.nan)

    return LossTokens(
        logprobs_T=logprobs_T.requires_grad_(),
        behaviour_T=near(0.1).detach(),
        advantages_T=torch.tensor([1.0, 1.0, torch.nan, -0.5, -0.5, 0.5, 0.0, torch.nan]),
        trained_T=trained_T,
        ages_T=torch.tensor([0, 0, 0, 1, 1, 2, 2, 0]),
        sequences_T=torch.tensor([0, 0, 0, 1, 1, 2, 2, 3]),
        reference_T=near(0.2).detach() if config.kl_coefficient else None,
        before_T=near(0.1).detach() if is_anchored else None,
    )


def _part(tokens: LossTokens, chosen: tuple[int, ...]) -> LossTokens:
    index = torch.tensor(chosen)
    values: dict[str, Any] = {
        field.name: value[index].detach()
        for field in fields(tokens)
        if (value := getattr(tokens, field.name)) is not None
    }
    _, values["sequences_T"] = torch.unique(values["sequences_T"], return_inverse=True)
    return replace(tokens, **values | {"logprobs_T": values["logprobs_T"].requires_grad_()})
