"""TRL's side of `benchmarks.peers`: its `GRPOTrainer`, run as its users run it.

    python -m benchmarks.peers_trl WORK.json

Runs in an environment that has TRL (`benchmarks.peers_setup`), and writes the results of each step
to the path that ``WORK.json`` names. TRL gets the settings that are fastest on a CPU: float32, no
gradient checkpointing, no reference model, no reports.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers_work import Workload, even_share

_PACKAGES = ("trl", "transformers", "accelerate", "torch")


@dataclass(slots=True)
class Log:
    """The measurements of each step. ``clock`` begins with the time at which the first step
    began."""

    clock: list[float] = field(default_factory=list)
    generation_s: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)


class TimedPolicy(Qwen3ForCausalLM):
    """The policy. `generate` is timed, and gives answers of fixed lengths if the workload has
    any."""

    log: Log
    next_lengths: Callable[[], tuple[int, ...]] | None = None

    def generate(self, *args: Any, **options: Any) -> Any:
        if self.next_lengths is not None:
            fixed = FixedLengths(
                torch.tensor(self.next_lengths()),
                num_prompt_tokens=options["input_ids"].shape[1],
                end_token=self.generation_config.eos_token_id,
            )
            options["logits_processor"] = LogitsProcessorList([fixed])
        started = time.perf_counter()
        answers = super().generate(*args, **options)
        self.log.generation_s.append(time.perf_counter() - started)
        return answers


class FixedLengths(LogitsProcessor):
    """Forces the end token as token ``lengths_B[i]`` of answer i, and never before."""

    def __init__(self, lengths_B: torch.Tensor, *, num_prompt_tokens: int, end_token: int) -> None:
        self._lengths_B = lengths_B
        self._num_prompt_tokens = num_prompt_tokens
        self._end_token = end_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_last_B = self._lengths_B == input_ids.shape[1] - self._num_prompt_tokens + 1
        scores[:, self._end_token] = -torch.inf
        scores[is_last_B] = -torch.inf
        scores[is_last_B, self._end_token] = 0.0
        return scores


class StepClock(TrainerCallback):
    def __init__(self, log: Log) -> None:
        self._log = log

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._log.clock.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._log.clock.append(time.perf_counter())


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    workload = Workload(**given["workload"])
    steps = given["steps"]
    log = Log()
    policy = TimedPolicy.from_pretrained(given["policy"], dtype=torch.float32)
    policy.log = log
    if workload.median:
        lengths = (workload.step_lengths(step) for step in range(steps))
        policy.next_lengths = lengths.__next__

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        log.generated.append(sum(map(len, completion_ids)))
        return [even_share(token_ids) for token_ids in completion_ids]

    trainer = GRPOTrainer(
        model=policy,
        processing_class=AutoTokenizer.from_pretrained(given["policy"]),
        reward_funcs=reward,
        args=settings(given, workload),
        train_dataset=Dataset.from_dict(
            {"prompt": [workload.prompt(index) for index in range(steps * workload.groups)]}
        ),
        callbacks=[StepClock(log)],
    )
    trainer.train()
    seconds = [end - start for start, end in zip(log.clock, log.clock[1:], strict=False)]
    Path(given["output"]).write_text(
        json.dumps(
            {
                "seconds": seconds,
                "rollout_s": log.generation_s,
                "generated": log.generated,
                "packages": {name: version(name) for name in _PACKAGES},
            }
        )
    )


def settings(given: dict[str, Any], workload: Workload) -> GRPOConfig:
    """TRL's defaults, except what the work sets and what costs time on a CPU."""
    optimizer = given["optimizer"]
    return GRPOConfig(
        output_dir=given["output_dir"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=given["seed"],
        max_steps=given["steps"],
        per_device_train_batch_size=given["microbatch"],
        gradient_accumulation_steps=workload.answers // given["microbatch"],
        num_generations=workload.group_size,
        max_completion_length=workload.longest,
        temperature=1.0,
        beta=0.0,
        learning_rate=optimizer["learning_rate"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["max_grad_norm"],
        lr_scheduler_type="constant",
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
    )


if __name__ == "__main__":
    main()
