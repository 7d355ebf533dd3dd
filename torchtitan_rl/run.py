"""One training run from start to exit code: processes up, the loop, processes down.

Exit codes: 0 done; 1 failed, with the cause on stderr; 128 + n ended in order by signal n.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan_rl.config import RunConfig
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.observability.engine_sampler import EngineSampler
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.orchestration.sync_controller import (
    LoopSettings,
    StopRequested,
    SyncController,
)
from torchtitan_rl.orchestration.trainer import Trainer
from torchtitan_rl.prepare import PreparedRun
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.checkpoints import CheckpointDirectory
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.adapters.monarch_run import RunProcesses


def run_training(prepared: PreparedRun) -> int:
    """Runs to the end, to a signal or to an error; no process is left behind."""
    prepared.config.log_dir.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_run(prepared))


@dataclass(slots=True)
class _Signals:
    """The first SIGINT or SIGTERM asks the run to stop in order, a second one ends it at once."""

    controller: SyncController | None = None
    received: list[int] = field(default_factory=list)

    def install(self) -> None:
        main = asyncio.current_task()
        if main is None:
            raise RuntimeError("signals are installed from within a task")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number, main)

    def _on_signal(self, number: int, main: asyncio.Task[int]) -> None:
        self.received.append(number)
        if self.controller is not None and len(self.received) == 1:
            self.controller.request_stop()
        else:
            main.cancel()


async def _run(prepared: PreparedRun) -> int:
    signals = _Signals()
    signals.install()
    try:
        await _train(prepared, signals)
    except (StopRequested, asyncio.CancelledError) as error:
        if not signals.received:
            raise
        print(str(error) or "stopped before the first step", file=sys.stderr)
        return 128 + signals.received[0]
    except TorchtitanRLError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


async def _train(prepared: PreparedRun, signals: _Signals) -> None:
    from torchtitan_rl.adapters.monarch_run import run_processes

    config = prepared.config
    is_resumed = config.checkpoint.resume
    checkpoints = CheckpointDirectory(config.run_dir.absolute() / "checkpoints")
    recorder = RunRecorder(config, resume_step=_last_step(checkpoints) if is_resumed else None)
    try:
        async with recorder:
            tokenizer = await asyncio.to_thread(_load_tokenizer, prepared)
            async with AsyncExitStack() as stack:
                recorder.say(f"starting; outputs and logs are in {config.run_dir}")
                with recorder.phase("start"):
                    processes = await stack.enter_async_context(
                        run_processes(prepared, trace_dir=recorder.trace_dir)
                    )
                router = _router(config, processes)
                recorder.watch_engines(await stack.enter_async_context(EngineSampler(router.stats)))
                controller = _controller(
                    config, processes.trainer, router, tokenizer, recorder, checkpoints
                )
                signals.controller = controller
                await controller.run(resume=is_resumed)
                if config.checkpoint.export_hf:
                    with recorder.phase("export"):
                        await processes.trainer.export_hf(config.run_dir.absolute() / "policy")
    finally:
        recorder.merge_traces()


def _router(config: RunConfig, processes: RunProcesses) -> GeneratorRouter:
    return GeneratorRouter(
        processes.replicas,
        request_timeout_s=config.generator.request_timeout_s,
        sync_timeout_s=config.weight_sync.timeout_s,
    )


def _controller(
    config: RunConfig,
    trainer: Trainer,
    router: GeneratorRouter,
    tokenizer: Any,
    recorder: RunRecorder,
    checkpoints: CheckpointDirectory,
) -> SyncController:
    rollouter = Rollouter(
        generate=router.generate,
        environment=partial(config.task.environment, tokenizer=tokenizer, limits=config.rollout),
        config=config.rollout,
        rubric=config.task.rubric(),
    )
    return SyncController(
        LoopSettings(
            num_steps=config.num_steps,
            groups_per_step=config.rollout.groups_per_step,
            group_size=config.rollout.group_size,
            temperature=config.rollout.sampling.temperature,
            seed=config.seed,
            sync_mode=config.weight_sync.mode,
            validate_every=config.validation.every,
            validation_samples=config.validation.samples_per_problem,
            validation_temperature=config.validation.temperature,
            checkpoint_every=config.checkpoint.every,
            checkpoints_kept=config.checkpoint.keep,
        ),
        dataset=config.task.dataset("train", seed=config.seed),
        validation_problems=_validation_problems(config),
        rollouter=rollouter,
        batcher=EpisodeBatcher(
            advantage=config.rollout.advantage,
            row_len=config.trainer.row_len,
            temperature=config.rollout.sampling.temperature,
        ),
        trainer=trainer,
        router=router,
        recorder=recorder,
        checkpoints=checkpoints,
    )


def _load_tokenizer(prepared: PreparedRun) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepared.policy_dir)


def _last_step(checkpoints: CheckpointDirectory) -> int | None:
    steps = checkpoints.steps()
    return steps[-1] if steps else None


def _validation_problems(config: RunConfig) -> list[Problem]:
    """The same problems at each validation, and for each seed, so that runs compare."""
    dataset = config.task.dataset("validation", seed=0)
    return [dataset.next() for _ in range(config.validation.num_problems)]
