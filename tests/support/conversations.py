"""Small files of conversations and of pairs, and runs on them with a simulated trainer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.simulated_parts import Memory
from tests.support.simulated_trainer import SimTrainer
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.commands.train import supervision_of
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.experiments.alphabet_sort.warm_start import build_tokenizer
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.orchestration.checkpointing import choose_checkpoint
from torchtitan_rl.orchestration.journal import JOURNAL, Journal
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import Recorder
from torchtitan_rl.orchestration.run_state import Parts
from torchtitan_rl.orchestration.supervised import SupervisedController
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint

tokenizer = cache(build_tokenizer)
NAMES = ("Ann", "Bob", "Carl", "Dora", "Eve", "Finn", "Gina", "Hugo", "Ida")


def conversation(number: int, answer: str = "") -> list[dict[str, str]]:
    name = NAMES[number % len(NAMES)]
    return [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": f"Sort {name} {number}"},
        {"role": "assistant", "content": answer or f"{name} {number}"},
    ]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def examples_file(path: Path, number: int = 10, first: int = 0) -> str:
    rows = [{"messages": conversation(one)} for one in range(first, first + number)]
    return write_rows(path, rows)


def pairs_file(path: Path, number: int = 10, first: int = 0) -> str:
    return write_rows(path, [pair(one) for one in range(first, first + number)])


def pair(number: int, answer: str = "") -> dict[str, Any]:
    *prompt, chosen = conversation(number, answer)
    rejected = {"role": "assistant", "content": f"no {number}"}
    return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}


class Life:
    """One process of a run on conversations, without processes. Make it on the loop that runs
    it."""

    def __init__(
        self,
        config: RunConfig,
        *,
        recorder: Recorder | None = None,
        trainer: SimTrainer | None = None,
    ) -> None:
        run_dir = config.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self.trainer = trainer or SimTrainer(chance=random.Random(0), step_s=1.0)
        self.recorder = recorder or Memory()
        self.checkpoints = CheckpointDirectory(run_dir / "checkpoints")
        self.journal = Journal(run_dir / JOURNAL)
        self.router = router = GeneratorRouter(())
        self.rollouter = Rollouter(
            generate=router.generate,
            environment=lambda problem: config.task.environment(
                problem, tokenizer=None, limits=config.rollout
            ),
            config=config.rollout,
        )
        parts = Parts(
            dataset=config.task.dataset("train", seed=config.seed),
            evaluation_problems=(),
            rollouter=self.rollouter,
            batcher=EpisodeBatcher(config=config.rollout, row_len=64),
            trainer=self.trainer,
            router=router,
            recorder=self.recorder,
            checkpoints=self.checkpoints,
            journal=self.journal,
            ledger=TokenLedger(),
        )
        supervision = supervision_of(config, tokenizer())
        self.controller = SupervisedController(config, parts, supervision, run_dir)

    async def train(self, *, resume_from: NewestCheckpoint | None) -> None:
        await self.controller.run(resume_from=resume_from)

    @property
    def restarted(self) -> None:
        """See `Simulation.restarted`."""

    async def close_trainer(self) -> None:
        await self.trainer.close()

    def alongside(self) -> tuple[AbstractAsyncContextManager[object], ...]:
        """See `Simulation.alongside`; there are no replicas."""
        return ()

    async def run(self, *, resume: bool) -> None:
        found = choose_checkpoint(self.checkpoints, self.journal) if resume else None
        await self.controller.run(resume_from=found)


def live(
    config: RunConfig,
    *,
    resume: bool = False,
    stop_after: float | None = None,
    prepare: Callable[[Life], object] | None = None,
) -> tuple[Life, BaseException | None]:
    """One life of a run and its error. ``stop_after``: seconds after which a stop is requested."""

    async def work() -> tuple[Life, BaseException | None]:
        life = Life(config)
        if prepare is not None:
            prepare(life)
        running = asyncio.create_task(life.run(resume=resume))
        if stop_after is not None:
            await asyncio.wait({running}, timeout=stop_after)
            life.controller.request_stop()
        await asyncio.wait({running})
        return life, running.exception()

    result: tuple[Life, BaseException | None] = run_virtually(work())
    return result
