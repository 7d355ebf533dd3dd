"""Engines and trainers that compute in bfloat16 on a CPU, where a run computes in float32.

    python -m benchmarks.bfloat16_processes train CONFIG [options]

is ``torchtitan-rl train`` with such processes. The specifications of its processes bring the
change along: whatever unpickles one of them first replaces the functions that choose the dtype. As
on CUDA, weights are published in float32 or bfloat16 and used in bfloat16, and attention
accumulates in float32.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from typing import Any

from benchmarks.training_runs import ROOT
from torchtitan_rl.backends.specs import GeneratorSpec, TrainerSpec

DTYPE = "bfloat16"


class RoundingGenerator(GeneratorSpec):
    __slots__ = ()

    def __reduce__(self) -> Any:
        return _generator_spec, (_values(self),)


class RoundingTrainer(TrainerSpec):
    __slots__ = ()

    def __reduce__(self) -> Any:
        return _trainer_spec, (_values(self),)


def _values(spec: Any) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec)}


def _generator_spec(values: dict[str, Any]) -> GeneratorSpec:
    from torchtitan_rl.backends.vllm import engine

    arguments = engine.engine_arguments
    engine.engine_arguments = lambda spec: arguments(spec) | {"dtype": DTYPE}
    return GeneratorSpec(**values)


def _trainer_spec(values: dict[str, Any]) -> TrainerSpec:
    from torchtitan_rl.backends.titan import trainer
    from torchtitan_rl.backends.titan.tree_attention import TreeAttention

    build, attend = trainer.build_policy, TreeAttention.forward
    trainer.build_policy = lambda *args, dtype: build(*args, dtype=DTYPE)

    def attend_in_float32(self: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attend(self, q.float(), k.float(), v.float(), **options).to(v.dtype)

    TreeAttention.forward = attend_in_float32  # type: ignore[method-assign]
    return TrainerSpec(**values)


def main() -> None:
    from benchmarks import bfloat16_processes as this  # by its name, for the pickles
    from torchtitan_rl.backends.monarch import run
    from torchtitan_rl.commands.cli import main as cli

    generator_spec, trainer_spec = run._generator_spec, run._trainer_spec
    run._generator_spec = lambda *args, **options: this.RoundingGenerator(
        **_values(generator_spec(*args, **options))
    )
    run._trainer_spec = lambda *args: this.RoundingTrainer(**_values(trainer_spec(*args)))
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.exit(cli())


if __name__ == "__main__":
    main()
