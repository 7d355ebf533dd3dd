"""Checks of runs whose policy takes images: what such a run cannot do, and what it needs."""

from __future__ import annotations

from importlib.util import find_spec

from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.config.model import PolicyFacts
from torchtitan_rl.distillation.config import TeacherConfig
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.training.config import TrainerConfig


def _takes_images(policy: PolicyFacts) -> bool:
    return policy.architecture is not None and policy.architecture.vision is not None


def engine_image_errors(generator: GeneratorConfig, policy: PolicyFacts) -> list[str]:
    """Check the engines of a policy; nothing is wrong for one that takes text only."""
    if not _takes_images(policy):
        return []
    errors = []
    if "speculative_config" in generator.vllm:
        errors.append(
            "generator.vllm has a speculative_config: with a policy that takes images nothing is "
            "drafted; leave it out"
        )
    if find_spec("torchvision") is None:
        errors.append(
            "policy.checkpoint takes images, for which vLLM needs torchvision: install "
            "torchtitan-rl[images], on a CPU from PyTorch's index (docs/images.md)"
        )
    return errors


def trainer_image_errors(
    trainer: TrainerConfig, policy: PolicyFacts, lora: LoraConfig, teacher: TeacherConfig
) -> list[str]:
    """Check the trainer's options; one message per error."""
    if not _takes_images(policy):
        if trainer.train_vision_tower:
            return ["trainer.train_vision_tower is on: the policy takes text only; leave it out"]
        return []
    errors = []
    if trainer.tensor_parallel > 1:
        errors.append(
            f"trainer.tensor_parallel is {trainer.tensor_parallel}: a vision tower is not split; "
            "give 1, and trainer.data_parallel_shard instead"
        )
    if trainer.context_parallel > 1:
        errors.append(
            f"trainer.context_parallel is {trainer.context_parallel}: with a policy that takes "
            "images give 1"
        )
    if trainer.compile:
        errors.append("trainer.compile is on: a policy that takes images is not compiled; leave it")
    if lora.rank:
        errors.append(f"policy.lora.rank is {lora.rank}: with a policy that takes images give 0")
    if teacher.is_on:
        errors.append("teacher: with a policy that takes images there is no teacher; leave it out")
    return errors
