"""Configuration of the trainer, its loss and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss; each field is one choice. `training/losses` has the formulas, and the
    options of published methods. The defaults are GRPO's clipped surrogate with DAPO's clip-higher
    and token mean."""

    function: str = ""
    """A loss of your own instead, ``package.module:function`` or ``path/file.py:function``. It gets
    the other fields, which have the meaning that it gives them."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """PPO's clipped surrogate, or CISPO's clipped weights on the log-likelihood."""
    ratio: Literal["token", "sequence"] = "token"
    """Ratio of each token, or geometric mean of the whole sequence (GSPO)."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - ``clip_low``."""
    clip_high: float = 0.28
    """The ratio is clipped above 1 + ``clip_high``. Larger than ``clip_low`` is DAPO's
    clip-higher."""
    proximal_policy: Literal["behaviour", "recomputed", "interpolated"] = "behaviour"
    """The policy that the ratio is taken against: the one that sampled the tokens, the weights
    before this step (decoupled PPO), or an interpolation of the two by the tokens' age (A-3PO)."""
    importance_weight: Literal["none", "token", "sequence"] = "none"
    """Importance weight, proximal / behaviour, of each token or of the whole sequence; for proximal
    policies other than behaviour."""
    importance_weight_cap: float = 2.0
    """Importance weights are truncated at this value."""
    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave out tokens, or sequences, whose ratio policy / behaviour is outside ``mask_low`` and
    ``mask_high``; of a sequence the product, or its ``geometric`` mean."""
    mask_low: float = 0.5
    """Smallest ratio policy / behaviour that is trained on."""
    mask_high: float = 5.0
    """Largest ratio policy / behaviour that is trained on."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over tokens (DAPO), mean over sequences (GRPO), or a constant divisor (Dr. GRPO)."""
    constant_length: int = 0
    """Number of tokens that each sequence counts as if ``aggregation`` is ``constant``."""
    kl_coefficient: float = 0.0
    """Weight of a KL penalty against the initial policy. Above 0, a second model is in memory."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL divergence (Schulman, "Approximating KL divergence")."""
    max_log_ratio: float = 20.0
    """Log-ratios are clamped to plus or minus this value before each exponential."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    learning_rate: float = 1e-6
    """Peak learning rate. The default is for large models: the small policies of the ready
    configurations learn nothing with it, and have 2e-4 to 1e-3."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moments."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_steps: int = 0
    """Last steps, over which the learning rate falls linearly to ``min_lr_factor`` of its peak."""
    min_lr_factor: float = 0.0
    """Share of the peak learning rate at the end of the decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""

    def learning_rate_factor(self, step: int, max_steps: int) -> float:
        """The share of the peak learning rate at optimizer step ``step`` (the first is 0).

        Warm-up reaches 1 at its last step; decay would reach ``min_lr_factor`` one step after the
        last. Where they overlap, the smaller one holds. Steps after ``max_steps`` keep the last
        value.
        """
        step = min(step, max_steps - 1)
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        left = min(1.0, (max_steps - step) / (self.decay_steps + 1)) if self.decay_steps else 1.0
        return min(warmup, self.min_lr_factor + (1.0 - self.min_lr_factor) * left)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The trainer. Its number of ranks is ``data_parallel_replicate`` x ``data_parallel_shard`` x
    ``tensor_parallel``."""

    data_parallel_replicate: int = 1
    """Replicas of the sharded model (HSDP)."""
    data_parallel_shard: int = 1
    """Ranks that parameters, gradients and optimizer state are sharded over (FSDP2)."""
    tensor_parallel: int = 1
    """Ranks that each layer is split over."""
    row_len: int = 512
    """Number of tokens of a row; at least that of the longest episode."""
    rows_per_microbatch: int = 8
    """Rows of one forward and backward pass on each rank, which computes at most this many times
    ``row_len`` tokens, and the logits of as many. Lower it when memory runs out."""
    share_prefixes: bool = True
    """Compute tokens that several episodes begin with once: the prompt of siblings, the history of
    branches, a common system prompt. Loss and gradient are the same up to rounding."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass to save memory."""
    compile: bool = False
    """Compile the model with ``torch.compile``. On the CPU a step of a small policy takes a tenth
    less, which pays in runs of several hundred steps: each begins with 10 to 40 s of compiling."""
    threads: int = 2
    """OpenMP threads of each rank."""
    updates_per_batch: int = 1
    """Optimizer updates of each step: the batch is cut into so many minibatches of whole groups. At
    most ``rollout.groups_per_step``."""
    step_timeout_s: float = 1800.0
    """Deadline of one training step, and of a collective between the ranks, in seconds."""
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def world_size(self) -> int:
        return self.data_parallel_replicate * self.data_parallel_shard * self.tensor_parallel
