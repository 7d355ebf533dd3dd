"""Configuration of the trainer, its loss and its optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from annotated_types import Interval

from torchtitan_rl.bounds import (
    MAX_FLOAT,
    Check,
    Count,
    OptionalName,
    Positive,
    PositiveFloat,
    Ranks,
    Seconds,
    Share,
    ShareBelowOne,
    Threads,
    Tokens,
    Weight,
)

_CLIPS_LOW = Check(
    lambda value: 0.0 < value < 1.0,
    "give a number between 0 and 1, for 1 - clip_low bounds a ratio from below",
)
_BELOW_ON_POLICY = Check(
    lambda value: 0.0 < value < 1.0,
    "give a number between 0 and 1, for 1 is the ratio of a token that is on policy",
)
_ABOVE_ON_POLICY = Check(
    lambda value: 1.0 < value <= MAX_FLOAT,
    "give a finite number above 1, for 1 is the ratio of a token that is on policy",
)
_CAPS_WEIGHTS = Check(
    lambda value: 1.0 <= value <= MAX_FLOAT,
    "give a finite number of at least 1, which is the weight of a token that is on policy",
)
_FITS_EXP = Check(
    lambda value: 0.0 < value <= 80.0,
    "give a number above 0 and at most 80; float32 overflows at exp(88)",
)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss; each field is one choice. `training/losses` has the formulas, and the
    options of published methods. The defaults are GRPO's clipped surrogate with DAPO's clip-higher
    and token mean."""

    function: OptionalName = ""
    """A loss of your own instead, ``package.module:function`` or ``path/file.py:function``. It
    receives the other fields and decides what they mean."""
    surrogate: Literal["clip", "cispo", "dpo"] = "clip"
    """PPO's clipped surrogate (``clip``), CISPO's clipped weights on the log-likelihood, or the
    loss of DPO on a pair of each group (``dpo``, with ``rollout.advantage pair``): of the other
    fields, ``dpo`` reads only ``dpo_beta``."""
    dpo_beta: PositiveFloat = 0.1
    """Weight of the distance from the initial policy in ``surrogate`` ``dpo``; a smaller one allows
    larger changes."""
    ratio: Literal["token", "sequence"] = "token"
    """Ratio of each ``token``, or geometric mean over the whole ``sequence`` (GSPO)."""
    clip_low: Annotated[float, _CLIPS_LOW] = 0.2
    """The ratio is clipped below 1 - ``clip_low``."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped above 1 + ``clip_high``. A value larger than ``clip_low`` is DAPO's
    clip-higher."""
    proximal_policy: Literal["behaviour", "recomputed", "interpolated"] = "behaviour"
    """Denominator of the ratio: the policy that sampled the tokens (``behaviour``), the weights
    before this step (``recomputed``, decoupled PPO), or an interpolation of the two by the tokens'
    age (``interpolated``, A-3PO)."""
    importance_weight: Literal["auto", "none", "token", "sequence"] = "auto"
    """Importance weight, proximal / behaviour, of each token or of the whole sequence. Needed with
    proximal policies other than ``behaviour``. ``auto`` corrects for the engines' rounding where
    they compute in bfloat16 (CUDA), see docs/training.md; ``none`` turns that off."""
    importance_weight_cap: Annotated[float, _CAPS_WEIGHTS] = 2.0
    """Importance weights are truncated at this value."""
    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave out tokens or sequences whose ratio policy / behaviour is outside ``mask_low`` to
    ``mask_high``. The ratio of a sequence is its tokens' product (``sequence``) or geometric mean
    (``geometric``)."""
    mask_low: Annotated[float, _BELOW_ON_POLICY] = 0.5
    """Smallest ratio policy / behaviour that is trained on, if ``mask`` is on."""
    mask_high: Annotated[float, _ABOVE_ON_POLICY] = 5.0
    """Largest ratio policy / behaviour that is trained on, if ``mask`` is on."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over tokens (DAPO), mean over sequences (GRPO), or a constant divisor (Dr. GRPO)."""
    constant_length: Annotated[int, Interval(ge=0, le=1 << 24)] = 0
    """Number of tokens that each sequence counts as; only with ``aggregation`` ``constant``."""
    kl_coefficient: Weight = 0.0
    """Weight of a KL penalty against the initial policy; 0 turns it off. Above 0, a second model is
    kept in memory, unless adapters are trained (``policy.lora``)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL divergence (Schulman, "Approximating KL divergence")."""
    max_log_ratio: Annotated[float, _FITS_EXP] = 20.0
    """Log-ratios are clamped to plus or minus this value before each exponential."""

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0.0 or self.surrogate == "dpo"


def decided_loss(loss: LossConfig, *, rounds: bool, staleness: int) -> LossConfig:
    """Replace ``importance_weight`` ``auto`` by a decision for a run. ``rounds``: engines and
    trainer compute in bfloat16, so their logprobs of a token differ.

    With the proximal policy ``behaviour`` the ratio already is trainer / engine, and a weight would
    correct twice. But the clip then also drops tokens that only rounding has moved out of its
    bounds. So the proximal policy of tokens of the newest weights becomes the trainer's: rounding
    is in the truncated weight alone (TIS, Yao et al. 2025, see `losses/policy.py`), and the clip
    bounds only what updates change. `interpolated` leaves tokens of the version before to the clip.
    CISPO, GSPO and a loss of one's own have their own treatment of ratios.
    """
    if loss.importance_weight != "auto":
        return loss
    if loss.proximal_policy != "behaviour":
        return replace(loss, importance_weight="token")
    if not rounds or loss.surrogate != "clip" or loss.ratio != "token" or loss.function:
        return replace(loss, importance_weight="none")
    proximal: Literal["recomputed", "interpolated"] = "interpolated" if staleness else "recomputed"
    return replace(loss, proximal_policy=proximal, importance_weight="token")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate. The default is for large models; small ones need more: the ready
    configurations have 2e-4 to 1e-3."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moments."""
    eps: Annotated[float, Interval(gt=0.0, le=1.0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Weight = 0.0
    """AdamW's decoupled weight decay."""
    warmup_steps: Count = 0
    """Number of first steps over which the learning rate rises linearly from 0."""
    decay_steps: Count = 0
    """Number of last steps over which the learning rate falls linearly to ``min_lr_factor`` of its
    peak. A run that is shorter decays over all steps after the warm-up."""
    min_lr_factor: Share = 0.0
    """Share of the peak learning rate at the end of the decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""

    def learning_rate_factor(self, step: int, max_steps: int) -> float:
        """The share of the peak learning rate at optimizer step ``step`` (the first is 0; after
        ``max_steps`` the last value holds). Warm-up reaches 1 at its last step; decay would reach
        ``min_lr_factor`` one step after the last. Where they overlap, the smaller factor holds."""
        step = min(step, max_steps - 1)
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        # Otherwise a run that is made shorter would begin within its decay.
        decay_steps = min(self.decay_steps, max_steps - max(1, self.warmup_steps))
        left = min(1.0, (max_steps - step) / (decay_steps + 1)) if decay_steps > 0 else 1.0
        return min(warmup, self.min_lr_factor + (1.0 - self.min_lr_factor) * left)


_ATTENTION_BLOCK = 128  # tokens; FlexAttention computes whole blocks


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The trainer. Its number of ranks is ``data_parallel_replicate`` x ``data_parallel_shard`` x
    ``context_parallel`` x ``tensor_parallel``; ``expert_parallel`` adds none."""

    data_parallel_replicate: Ranks = 1
    """Number of copies of the sharded model, each trained on a part of the batch (HSDP)."""
    data_parallel_shard: Ranks = 1
    """Number of ranks that parameters, gradients and optimizer state are sharded over (FSDP2).
    Raise it for a policy that does not fit on one device."""
    context_parallel: Ranks = 1
    """Number of ranks that the tokens of each forward and backward pass are split over; they also
    shard the parameters. The heads are divided by it in attention (Ulysses), so it divides the
    policy's heads and key/value heads. Raise it for episodes that do not fit on one device."""
    tensor_parallel: Ranks = 1
    """Number of ranks that each layer is split over."""
    expert_parallel: Ranks = 1
    """Number of ranks that the experts of an MoE policy are distributed over: a divisor of
    ``data_parallel_shard`` x ``context_parallel`` x ``tensor_parallel`` and a multiple of
    ``tensor_parallel``. These ranks exchange tokens instead of gathering all experts."""
    max_episode_tokens: Tokens = 512
    """Maximum length of an episode, in tokens; at least ``rollout.max_total_tokens``."""
    max_tokens_per_microbatch: Tokens = 4096
    """Maximum number of tokens of one forward and backward pass, which the ranks of
    ``context_parallel`` split; at least ``max_episode_tokens``. Lower it if memory runs out."""
    share_prefixes: bool = True
    """Compute tokens that several episodes begin with only once: the prompt of siblings, the
    history of branches, a common system prompt. Loss and gradient are equal up to rounding."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: saves memory and takes time."""
    compile: bool = False
    """Compile the model with ``torch.compile``. On a CPU a step of a small policy takes a tenth
    less, but each run compiles for 10 to 40 s first: worth it from several hundred steps on."""
    train_vision_tower: bool = False
    """Train the vision tower of a policy that takes images. Otherwise it stays as it is, and only
    the decoder is trained."""
    threads: Threads = 2
    """OpenMP threads of each rank."""
    updates_per_batch: Annotated[int, Interval(ge=1, le=1 << 16)] = 1
    """Number of optimizer updates in each step, each on a minibatch of whole groups; at most
    ``rollout.groups_per_step``."""
    sft_coefficient: Weight = 0.0
    """Weight of a supervised loss in each step of reinforcement learning: the mean negative logprob
    of conversations from ``examples.train``. It keeps the policy near their format. 0: none."""
    step_timeout_s: Seconds = 1800.0
    """Deadline of one training step, and of each exchange between the ranks, in seconds."""
    max_restarts: Count = 2
    """Maximum number of times that a lost trainer is started again without a new step between. It
    takes the steps since a checkpoint again, with the same batches, which the folder of the run
    holds until then. 0: the loss of the trainer ends the run."""
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def world_size(self) -> int:
        return self.data_parallel_replicate * self.num_shards * self.tensor_parallel

    @property
    def num_shards(self) -> int:
        """Number of ranks that parameters, gradients and optimizer state are sharded over."""
        return self.data_parallel_shard * self.context_parallel

    @property
    def token_parts(self) -> int:
        """The number of parts that tokens are split into between layers."""
        return self.context_parallel * self.tensor_parallel

    @property
    def call_limit_s(self) -> float:
        """Seconds that a call may take in which the trainer is lost and started again."""
        return (2 + self.max_restarts) * self.step_timeout_s

    @property
    def num_threads(self) -> int:
        return self.world_size * self.threads

    def pass_sizes(self, device: str) -> tuple[int, int]:
        """Return the largest number of tokens of a forward pass before padding, and the number of
        which its padded size is a multiple."""
        largest = self.max_tokens_per_microbatch
        if device == "cpu":
            return largest, self.token_parts
        if self.compile:
            return largest, largest  # every new size would be compiled again
        # The attention kernels are compiled for the first size, and at the second for all others.
        multiple = math.lcm(_ATTENTION_BLOCK, self.token_parts)
        return max(largest - largest % multiple, self.max_episode_tokens), multiple


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Profiles by `torch.profiler`, in the folder ``profile`` of the run: for Perfetto or
    chrome://tracing, a trace of the optimizer step or of an engine; on CUDA also a snapshot of the
    trainer's memory."""

    steps: tuple[Positive, ...] = ()
    """Steps to profile, by the policy version that they make: step 5 makes version 5, unless an
    earlier step had nothing to train on. A profiled step takes longer."""
    ranks: tuple[Count, ...] = (0,)
    """Trainer ranks that are profiled."""
    replicas: tuple[Count, ...] = ()
    """Replicas whose engines are profiled, from their pull of the version that each of ``steps``
    begins with, for 20 engine steps."""
