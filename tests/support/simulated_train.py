"""``torchtitan-rl train`` with simulated trainer and replicas, as ``python -m
tests.support.simulated_train CONFIG [options]``. Console, signals and controller are the real ones.

What libraries do to a console is done here: native code writes to the file descriptors, a logger
warns, and an exit handler raises.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import sys
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from tests.support.simulated_replica import SimReplica
from tests.support.simulated_trainer import SimTrainer
from torchtitan_rl.commands.cli import main
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.errors import DivergedError
from torchtitan_rl.weights.distribution import WeightDistribution

NOISE = "nanobind: leaked 3 instances!"


@asynccontextmanager
async def run_processes(
    prepared: PreparedRun, *, trace_dir: Path | None, hosts: object
) -> AsyncIterator[types.SimpleNamespace]:
    os.write(1, f"{NOISE}\n".encode())
    os.write(2, f"{NOISE}\n".encode())
    logging.getLogger("monarch").error(NOISE)
    chance = random.Random(0)
    trainer = SimTrainer(chance=chance, step_s=0.2)
    if "DIVERGES" in os.environ:
        trainer.train_step = diverge  # type: ignore[method-assign]
    replicas = [
        SimReplica(group.name, chance=chance, trainer=trainer, token_s=0.001)
        for group in prepared.plan.replicas
    ]
    weights = WeightDistribution({}, fan_out=0)
    yield types.SimpleNamespace(
        trainers=[trainer], replicas=replicas, weights=weights, teachers={}, endpoint=None
    )


async def diverge(*_: object, **__: object) -> NoReturn:
    raise DivergedError("loss is nan")


def complain() -> None:
    raise RuntimeError(NOISE)


if __name__ == "__main__":
    module = types.ModuleType("torchtitan_rl.backends.monarch.run")
    vars(module)["run_processes"] = run_processes
    sys.modules[module.__name__] = module
    atexit.register(complain)
    sys.exit(main(["train", *sys.argv[1:]]))
