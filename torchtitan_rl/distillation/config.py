"""Configuration of the teachers of on-policy distillation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from annotated_types import Interval

from torchtitan_rl.bounds import LongSeconds, OptionalName, PositiveFloat, Ranks, without_login
from torchtitan_rl.generation.config import GeneratorConfig, VllmOptions
from torchtitan_rl.rollout.config import RolloutConfig

_WITHOUT_LOGIN = without_login("export the key as TORCHTITAN_RL_TEACHER_KEY")
CUDA_STEP_TOKENS = 2048  # float32 logprobs of 150,000 tokens each take 1.2 GB


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """On-policy distillation: models that score the tokens that the policy sampled. Without a
    ``checkpoint``, ``url`` or ``by_task`` there is no teacher."""

    checkpoint: Annotated[OptionalName, _WITHOUT_LOGIN] = ""
    """The teacher: a checkpoint as in ``policy.checkpoint``, of any model that vLLM serves, on
    replicas of its own; with ``loss full`` of a model that can be trained, in the trainer. It must
    have the policy's tokenizer."""
    url: Annotated[OptionalName, _WITHOUT_LOGIN] = ""
    """The teacher: a server with the policy's tokenizer that returns prompt logprobs, such as
    ``vllm serve`` (``http://10.0.0.5:8000/v1``). The key in ``TORCHTITAN_RL_TEACHER_KEY`` is sent
    to it."""
    model: OptionalName = ""
    """The teacher's name on the servers. Empty: the first model that a server names."""
    by_task: dict[str, Annotated[str, _WITHOUT_LOGIN]] = field(default_factory=dict)
    """Teachers of the parts of a mixture: a part's name, then a checkpoint or a URL. Other parts
    have the teacher of ``checkpoint`` or ``url``, or no teacher."""
    coefficient: PositiveFloat = 1.0
    """Weight of the teacher. Rewards have the weight 1; they are left out with
    ``rollout.advantage none``."""
    loss: Literal["sampled", "topk", "full"] = "sampled"
    """``sampled``: the advantage of each sampled token gets ``coefficient`` x (teacher's logprob -
    policy's logprob), which estimates the gradient of the reverse KL. ``topk``: the loss gets
    ``coefficient`` x the forward KL over the teacher's ``top_k`` most likely tokens and the rest as
    one: less noise, larger answers of the teacher. ``full``: the loss gets ``coefficient`` x the
    reverse KL over the whole vocabulary: the least noise, and the trainer holds the teacher."""
    top_k: Annotated[int, Interval(ge=1, le=1024)] = 8
    """With ``loss topk``: number of tokens. A server may give fewer (``vllm serve``: 20, if it was
    not started with more)."""
    replicas: Ranks = 1
    """Number of replicas of each checkpoint. Add replicas if ``train/phase_s/teacher_mean`` is
    large."""
    tensor_parallel: Ranks = 1
    """Number of ranks that the weights of each of these replicas are split over."""
    vllm: VllmOptions = field(default_factory=dict)
    """Further fields of vLLM's ``EngineArgs`` for these replicas, as in ``generator.vllm``. A
    teacher may be quantized."""
    timeout_s: LongSeconds = 600.0
    """Deadline for the scores of one rollout, in seconds. Until then, a server that fails is asked
    again, and a lost replica's work is done by another one. Then the run ends, and can be
    resumed."""

    @property
    def is_on(self) -> bool:
        return bool(self.sources)

    @property
    def sources(self) -> tuple[str, ...]:
        """All distinct checkpoints and URLs, that of the remaining tasks first."""
        given = (self.checkpoint or self.url, *self.by_task.values())
        return tuple(dict.fromkeys(one for one in given if one))

    @property
    def num_top(self) -> int:
        """The number of most likely tokens that the loss needs."""
        return self.top_k if self.is_on and self.loss == "topk" else 0

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return tuple(one for one in self.sources if not is_url(one))

    @property
    def is_in_trainer(self) -> bool:
        """Whether the trainer computes the teachers' distributions, and no replica."""
        return self.is_on and self.loss == "full"

    @property
    def num_replicas(self) -> int:
        return 0 if self.is_in_trainer else len(self.checkpoints) * self.replicas

    def source_for(self, task: str) -> str:
        """The teacher of a part of a mixture; empty if it has none."""
        return self.by_task.get(task) or self.checkpoint or self.url

    def number_for(self, task: str) -> int:
        """The index of `source_for` in ``sources``; -1 without a teacher."""
        source = self.source_for(task)
        return self.sources.index(source) if source else -1

    def generator(self, generator: GeneratorConfig, max_tokens: int) -> GeneratorConfig:
        """The configuration of a teacher's replicas, from that of the policy's. ``max_tokens`` is
        the length of the longest rollout."""
        return replace(
            generator,
            endpoint="",
            replicas=self.replicas,
            tensor_parallel=self.tensor_parallel,
            max_model_len=max_tokens + 1,  # the request for scores also samples one token
            enable_prefix_caching=False,  # vLLM computes a whole prompt to score it
            vllm=self.vllm,
        )


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def engine_options(config: TeacherConfig, device: Literal["cpu", "cuda"]) -> VllmOptions:
    """The fields of ``EngineArgs`` that scoring needs, in addition to the user's."""
    options = {**config.vllm, "max_logprobs": max(config.num_top, 1)}
    if device == "cuda":  # vLLM keeps the logits of all tokens of a prompt's part
        options["max_num_batched_tokens"] = CUDA_STEP_TOKENS
    return options


def teacher_errors(
    config: TeacherConfig, rollout: RolloutConfig, *, parts: Collection[str]
) -> list[str]:
    """Errors in the fields; ``parts`` are the names of a mixture's parts."""
    errors = []
    sampling = rollout.sampling
    for name, whole in {"top_p": 1.0, "top_k": 0, "min_p": 0.0}.items():
        if getattr(sampling, name) != whole and config.is_on and config.loss == "topk":
            errors.append(
                f"teacher.loss is topk: rollout.sampling.{name} excludes tokens that the teacher "
                "may find likely, and the KL would be infinite; sample from all tokens, or give "
                "teacher.loss sampled"
            )
    if config.is_in_trainer:
        errors += [
            f"teacher.loss is full: {source} is a server, and the trainer needs the teacher's "
            "weights; give its checkpoint, or teacher.loss topk"
            for source in config.sources
            if is_url(source)
        ]
    errors += [
        f"teacher.{name} is {getattr(config, name)}: {why}; leave it out"
        for name, why in _unread(config).items()
        if getattr(config, name) != getattr(TeacherConfig(), name)
    ]
    if config.url and not is_url(config.url):
        errors.append(f"teacher.url is {config.url!r}: give http:// or https://")
    elif config.checkpoint and config.url:
        errors.append(
            f"teacher.url is {config.url}: teacher.checkpoint is given too; give one of them, or "
            "teacher.by_task"
        )
    if is_url(config.checkpoint):
        errors.append(f"teacher.checkpoint is {config.checkpoint}: give a server by teacher.url")
    for name, source in config.by_task.items():
        if name not in parts:
            known = ", ".join(parts) or "this task has no parts"
            errors.append(f"teacher.by_task has {name!r}: give the name of a part ({known})")
        if not source:
            errors.append(f"teacher.by_task.{name} is empty: give a checkpoint or a URL")
    if rollout.advantage == "none" and not config.is_on:
        errors.append(
            "rollout.advantage is none: without a teacher nothing would be trained; give "
            "teacher.checkpoint or teacher.url, or another advantage"
        )
    return errors


def _unread(config: TeacherConfig) -> dict[str, str]:
    """The fields that the run does not read, and why."""
    if not config.is_on:
        return {}
    unread = {} if config.loss == "topk" else {"top_k": "it is read only with teacher.loss topk"}
    if config.is_in_trainer:
        why = "with teacher.loss full the teacher is in the trainer and has no replicas"
        return unread | dict.fromkeys(("replicas", "tensor_parallel", "vllm", "timeout_s"), why)
    if not config.checkpoints:
        why = "the teacher is a server and has no replicas here"
        unread |= dict.fromkeys(("replicas", "tensor_parallel", "vllm"), why)
    if len(config.checkpoints) == len(config.sources):
        unread["model"] = "no teacher is a server"
    return unread
