"""Losses: pure functions of ``[T]`` tensors, without a model or a process group.

Invariants: a loss is a sum over trained tokens, divided by totals of the *whole* optimizer step, so
that losses (and gradients) of microbatches and ranks add up to the same whatever the split, as long
as no sequence is split. Values where ``trained_T`` is False are never read, NaN included.

The options of `LossConfig` make up the published methods. The example prints what each does with
four tokens of age 2 and advantage 1, whose ratios policy / behaviour are 2, 1.1, 0.3 and 1; the
first two are one sequence. A column is how much the step raises the token's logprob (minus the
gradient); 0.00 is a token that the method clips or masks.

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

from torchtitan_rl.training.losses.metrics import loss_metrics
from torchtitan_rl.training.losses.policy import policy_loss
from torchtitan_rl.training.losses.tokens import (
    LossOutput,
    LossTokens,
    StepTotals,
    cross_entropy_loss,
)

__all__ = [
    "LossOutput",
    "LossTokens",
    "StepTotals",
    "cross_entropy_loss",
    "loss_metrics",
    "policy_loss",
]
