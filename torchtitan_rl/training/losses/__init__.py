"""Losses over ``[tokens]`` tensors: pure functions of one vocabulary, no model, no process group.

Invariants: a loss is a sum over trained tokens, divided by totals of the *whole* optimizer step, so
that losses (and gradients) of microbatches and ranks add up to the same whatever the split, as long
as no sequence is split. Values where ``trained_T`` is False are never read, NaN included.

The parts, each a choice of `LossConfig`, and the published methods that they make up:

| method | options |
|---|---|
| GRPO with DAPO's clip-higher and token mean | the defaults |
| Dr. GRPO | ``aggregation=constant`` (and ``rollout.advantage=mean``) |
| GSPO | ``ratio=sequence aggregation=sequence_mean``, clips of 3e-4 and 4e-4 |
| CISPO | ``surrogate=cispo``, clip_low near 1 |
| truncated importance sampling | ``proximal_policy=recomputed``, ``importance_weight=token`` |
| IcePop | the same with ``importance_weight_cap=5 mask=token`` |
| geometric sequence mask | ``mask=geometric``, bounds near 1 |
| decoupled PPO, A-3PO | ``proximal_policy=interpolated``, ``importance_weight=token`` |

Shapes: T tokens of one part (microbatch) of a step. What must not be combined is in
`config/checks/loss.py`.
"""

from torchtitan_rl.training.losses.cross_entropy import cross_entropy_loss
from torchtitan_rl.training.losses.metrics import loss_metrics
from torchtitan_rl.training.losses.policy import policy_loss
from torchtitan_rl.training.losses.tokens import LossOutput, LossTokens, StepTotals

__all__ = [
    "LossOutput",
    "LossTokens",
    "StepTotals",
    "cross_entropy_loss",
    "loss_metrics",
    "policy_loss",
]
