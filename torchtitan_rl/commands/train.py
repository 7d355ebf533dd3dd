"""One training run from start to exit code: processes up, the loop, processes down.

Exit codes: 0 done; 1 failed, with the cause on stderr; 128 + n ended in order by signal n.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchtitan_rl.agents.task import environment_factory
from torchtitan_rl.backends.monarch.cpu_cores import stay_on_cores
from torchtitan_rl.commands.run_endpoint import run_endpoint
from torchtitan_rl.config.plan import replica_name
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.observability.engine_sampler import EngineSampler
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.orchestration.capacity import Capacity
from torchtitan_rl.orchestration.consumer import ConsumerSettings, StopRequested
from torchtitan_rl.orchestration.controller import Controller, ControllerSettings
from torchtitan_rl.orchestration.device_sharing import during_step
from torchtitan_rl.orchestration.evaluation import EvaluationSettings
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.producer import ProducerSettings
from torchtitan_rl.orchestration.recovery import choose_checkpoint
from torchtitan_rl.orchestration.run_state import Parts
from torchtitan_rl.orchestration.sampled_tokens import SampledTokens
from torchtitan_rl.orchestration.trainer import Trainer
from torchtitan_rl.orchestration.weight_feed import FeedSettings
from torchtitan_rl.rollout.rollout_run import EnvironmentFactory
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.run import RunProcesses


def run_training(prepared: PreparedRun) -> int:
    """Runs to the end, to a signal or to an error; no process is left behind."""
    prepared.config.log_dir.mkdir(parents=True, exist_ok=True)
    stay_on_cores(prepared.plan.controller_cores)
    return asyncio.run(_run(prepared))


@dataclass(slots=True)
class _Signals:
    """The first SIGINT or SIGTERM asks the run to stop in order, a second one ends it at once."""

    controller: Controller | None = None
    say: Callable[[str], None] = print
    received: list[int] = field(default_factory=list)

    def describe(self) -> str:
        """Where a run was that a second signal ended."""
        if self.controller is None:
            return "stopped before the first step"
        return f"stopped at once after step {self.controller.step}; see the newest checkpoint"

    def install(self) -> None:
        main = asyncio.current_task()
        if main is None:
            raise RuntimeError("signals are installed from within a task")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number, main)

    def _on_signal(self, number: int, main: asyncio.Task[int]) -> None:
        self.received.append(number)
        if self.controller is not None and len(self.received) == 1:
            self.say("stopping after this step, with a checkpoint; a second signal ends at once")
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
        print(str(error) or signals.describe(), file=sys.stderr)
        return 128 + signals.received[0]
    except TorchtitanRLError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


async def _train(prepared: PreparedRun, signals: _Signals) -> None:
    config = prepared.config
    is_resumed = config.checkpoint.resume
    checkpoints = CheckpointDirectory(config.run_dir.absolute() / "checkpoints")
    journals = JournalDirectory(config.run_dir.absolute() / "journal")
    found = choose_checkpoint(checkpoints, journals) if is_resumed else NewestCheckpoint()
    from torchtitan_rl.backends.monarch.run import run_processes  # seconds

    recorder = RunRecorder(config, resume_step=found.step)
    try:
        async with recorder:
            tokenizer = await asyncio.to_thread(_load_tokenizer, prepared)
            async with AsyncExitStack() as stack:
                recorder.say(f"starting; outputs and logs are in {config.run_dir}")
                for line in (*prepared.notes, *found.passed_over):
                    recorder.say(line)
                with recorder.phase("start"):
                    processes = await stack.enter_async_context(
                        run_processes(prepared, trace_dir=recorder.trace_dir)
                    )
                sampled = SampledTokens()
                router = _router(config, processes, sampled)
                recorder.watch_engines(
                    await stack.enter_async_context(
                        EngineSampler(router.stats, reserved=reserved_replicas(config))
                    )
                )
                endpoint = None
                if processes.endpoint is not None:
                    endpoint = await stack.enter_async_context(
                        run_endpoint(processes.endpoint, router, config.endpoint, prepared.keys)
                    )
                    recorder.watch_endpoint(endpoint.take)
                    recorder.say(f"endpoint: {endpoint.host.base_url}")
                controller = _controller(
                    prepared,
                    processes.trainer,
                    router,
                    sampled,
                    environment_factory(
                        config.task,
                        tokenizer=tokenizer,
                        limits=config.rollout,
                        host=endpoint.host if endpoint is not None else None,
                    ),
                    recorder,
                    checkpoints,
                    journals,
                )
                signals.controller, signals.say = controller, recorder.say
                training = controller.run(resume_from=found if is_resumed else None)
                await (training if endpoint is None else endpoint.background(training))
                if config.checkpoint.export_hf:
                    with recorder.phase("export"):
                        await processes.trainer.export_hf(config.run_dir.absolute() / "policy")
    finally:
        recorder.merge_traces()


def _router(config: RunConfig, processes: RunProcesses, sampled: SampledTokens) -> GeneratorRouter:
    return GeneratorRouter(
        processes.replicas,
        on_ended=sampled.on_ended,
        request_timeout_s=config.request_timeout_s,
        sync_timeout_s=config.weight_sync.timeout_s,
        reserved=reserved_replicas(config),
    )


def _controller(
    prepared: PreparedRun,
    trainer: Trainer,
    router: GeneratorRouter,
    sampled: SampledTokens,
    environment: EnvironmentFactory,
    recorder: RunRecorder,
    checkpoints: CheckpointDirectory,
    journals: JournalDirectory,
) -> Controller:
    config = prepared.config
    return Controller(
        controller_settings(config, prepared.capacity),
        Parts(
            dataset=config.task.dataset("train", seed=config.seed),
            validation_problems=prepared.validation_problems,
            rollouter=Rollouter(
                generate=router.generate,
                environment=environment,
                config=config.rollout,
                rubric=config.task.rubric(),
                active_time=router.active_time,
            ),
            batcher=EpisodeBatcher(
                advantage=config.rollout.advantage,
                row_len=config.trainer.row_len,
                temperature=config.rollout.sampling.temperature,
            ),
            trainer=trainer,
            router=router,
            recorder=recorder,
            checkpoints=checkpoints,
            journals=journals,
            sampled=sampled,
            identity=prepared.identity,
        ),
    )


def controller_settings(config: RunConfig, capacity: Capacity) -> ControllerSettings:
    """Each loop's share of the configuration."""
    schedule, rollout = config.schedule, config.rollout
    return ControllerSettings(
        capacity=capacity,
        during_step=during_step(config.schedule, is_colocated=config.placement == "colocated"),
        producer=ProducerSettings(
            num_groups=config.num_steps * rollout.groups_per_step,
            surplus=max(0, capacity.buffer - rollout.groups_per_step)
            if capacity.staleness == 0
            else 0,
            group_size=rollout.group_size,
            temperature=rollout.sampling.temperature,
            seed=config.seed,
            zero_variance=schedule.zero_variance,
            max_resamples=schedule.max_resamples,
            max_skipped=schedule.max_empty_batches * rollout.groups_per_step,
        ),
        consumer=ConsumerSettings(
            num_steps=config.num_steps,
            checkpoint_every=config.checkpoint.every,
            max_empty_batches=schedule.max_empty_batches,
            step_timeout_s=config.trainer.step_timeout_s,
        ),
        evaluation=EvaluationSettings(
            every=config.validation.every,
            num_steps=config.num_steps,
            samples=config.validation.samples_per_problem,
            temperature=config.validation.temperature,
            seed=config.seed,
            success_reward=config.task.success_reward(),
        ),
        feed=FeedSettings(
            mode=config.weight_sync.mode,
            order=config.weight_sync.order,
            lag_timeout_s=config.weight_sync.lag_timeout_s,
        ),
        checkpoints_kept=config.checkpoint.keep,
        max_checkpoint_failures=config.checkpoint.max_failures,
        save_timeout_s=2 * config.trainer.step_timeout_s,
        report_wait_s=schedule.report_wait_s,
        max_wait_s=schedule.max_wait_s,
    )


def _load_tokenizer(prepared: PreparedRun) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepared.policy_dir)


def reserved_replicas(config: RunConfig) -> tuple[str, ...]:
    """The last replica, where validation keeps one for itself."""
    is_reserved = config.validation.placement == "reserved" and config.validation.num_problems > 0
    return (replica_name(config.generator.replicas - 1),) if is_reserved else ()
