"""``torchtitan-rl train CONFIG [options]``: one run, from its configuration to its exit code.

Exit codes: 0 done; 1 failed, with the cause on stderr; 2 the configuration is wrong; 128 + n ended
by signal n. In each case the last lines say how the run went and which command to use next.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.aio import background
from torchtitan_rl.commands.attaching import Attachment
from torchtitan_rl.commands.console import DryRun, StopSignals, end_within, print_error, run_command
from torchtitan_rl.commands.losses import FailureHandling
from torchtitan_rl.commands.replicas import Generation, run_endpoint
from torchtitan_rl.commands.scale import scaling_socket
from torchtitan_rl.commands.train_only import batcher_of, recorded_rollouts, train_on_recorded
from torchtitan_rl.commands.view import PAGE_HELP, PageAddress, page_of_run
from torchtitan_rl.config.hosts import start_errors, unused_options
from torchtitan_rl.config.loader import load_config, ready_configs, split_config
from torchtitan_rl.config.machine import count
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.config.plan import replica_name
from torchtitan_rl.config.prepare import PreparedRun, claim_run
from torchtitan_rl.config.problems import supervised_task
from torchtitan_rl.config.resume import MANIFEST, write_manifest
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.distillation.scoring import ReplicaTeacher, Teacher, Teachers
from torchtitan_rl.distillation.server import ServedTeacher
from torchtitan_rl.environments.supervised import SupervisedTask
from torchtitan_rl.errors import CheckpointError, ConfigError, OutputError, RunTakenOverError
from torchtitan_rl.launch.meeting import RESUME_COMMAND
from torchtitan_rl.observability.console import STEP_LINE, STEP_WORDS, format_seconds, usual_step_s
from torchtitan_rl.observability.engine import EngineSampler
from torchtitan_rl.observability.page_files import add_to_launch, write_launch
from torchtitan_rl.observability.recorded import RecordedRun
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.orchestration.checkpointing import choose_checkpoint
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.controller import Controller
from torchtitan_rl.orchestration.journal import JOURNAL, Journal
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.run_state import Claim, Parts, Trainer
from torchtitan_rl.orchestration.supervised import SupervisedController, Supervision, packed
from torchtitan_rl.processes import collect_less, stay_on_cores
from torchtitan_rl.rollout.places import Places
from torchtitan_rl.rollout.rendering import load_tokenizer
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.hosts import Hosts
    from torchtitan_rl.backends.monarch.run import RunProcesses

_HELP = f"""\
usage: torchtitan-rl train CONFIG [options]

CONFIG is a Python file with a RunConfig named config, or one of
{chr(10).join(f"  {name}" for name in ready_configs())}
Options: every field of the configuration, listed by torchtitan-rl train CONFIG --help
  --dry-run         check everything and print the plan, start nothing
  --dry-run --json  the plan and all fields of the configuration as JSON
{PAGE_HELP}
"""
_TAKEN_OVER_S = 5.0  # time for processes to end, before this controller ends without them


def main(words: Sequence[str]) -> int:
    usage = _HELP + STEP_WORDS
    return run_trainer(words, command="train", usage=usage, load=load_config)


def run_trainer(
    words: Sequence[str],
    *,
    command: str,
    usage: str,
    load: Callable[[Path, Sequence[str]], RunConfig],
) -> int:
    """Run a command that trains: ``torchtitan-rl COMMAND WORDS``. ``load`` loads the configuration
    in a file and applies options. Returns the exit code."""
    if list(words) in (["-h"], ["--help"]):
        print(usage)
        return 0
    config_file, options = split_config(words, prog=f"torchtitan-rl {command}", command=command)
    page, others = PageAddress.of(options)
    dry_run, overrides = DryRun.of(others)
    try:
        with dry_run.planning():
            config = load(config_file, overrides)
    except SystemExit as ended:
        if ended.code == 0:  # --help
            print(usage[usage.index(STEP_LINE) :])
        raise
    if not dry_run.is_wanted and (errors := start_errors(config.launch)):
        raise ConfigError(errors)
    for line in unused_options(config.launch):
        print(f"warning: {line}", file=sys.stderr)
    with Attachment(config) as attached:
        with dry_run.planning():
            prepared = attached.prepare()
        recorded = recorded_rollouts(prepared)
        if dry_run.is_wanted:
            return _show(prepared, dry_run)
        if prepared.is_complete:
            print("\n".join(prepared.notes))
            return 0
        resume = [] if "--checkpoint.resume" in options else ["--checkpoint.resume"]
        own = shlex.join(["torchtitan-rl", command, str(config_file), *options, *resume])
        resume_command = os.environ.get(RESUME_COMMAND, own)
        with ExitStack() as stack:
            serve_page = stack.enter_context(page_of_run(page))
            claim = stack.enter_context(claim_run(prepared))
            stay_on_cores(prepared.plan.controller_cores)
            url = serve_page(config.run_dir, config.log_dir)
            run_dir = config.run_dir.absolute()
            checkpoints = CheckpointDirectory(run_dir / "checkpoints")
            journal = Journal(run_dir / JOURNAL)
            journal.remove_stale_lock()
            is_resumed = prepared.config.checkpoint.resume
            run = _Run(
                prepared=prepared,
                hosts=attached.hosts,
                resume_command=resume_command,
                claim=claim,
                checkpoints=checkpoints,
                journal=journal,
                found=choose_checkpoint(checkpoints, journal) if is_resumed else NewestCheckpoint(),
                page=url,
                recorded=recorded,
            )
            write_launch(
                config.run_dir,
                command=shlex.join(["torchtitan-rl", command, str(config_file), *options]),
                resume_command=resume_command,
                plan=prepared.describe().splitlines(),
                policy_dir=prepared.policy_dir,
            )
            return run_command(partial(_run, run), log_dir=config.log_dir)


def _show(prepared: PreparedRun, dry_run: DryRun) -> int:
    lines, document = prepared.describe(), prepared.document()
    if prepared.resume_point is not None and not prepared.is_complete:
        left = prepared.config.num_steps - prepared.resume_point.step
        if step_s := usual_step_s(prepared.config.run_dir):
            document |= {"seconds_per_step": step_s}
            lines += f"\ntime: {step_s:.1f} s a step so far, {format_seconds(left * step_s)} left"
    return dry_run.show(lines, document)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run that is about to start. ``found`` is the checkpoint from which it continues; ``hosts``
    is None if all processes run on this machine; ``page`` names its page in the first line;
    ``recorded`` is the run whose rollouts are trained on, in a run that only trains."""

    prepared: PreparedRun
    hosts: Hosts | None
    resume_command: str
    claim: Claim
    checkpoints: CheckpointDirectory
    journal: Journal
    found: NewestCheckpoint
    page: str
    recorded: RecordedRun | None


async def _run(run: _Run, signals: StopSignals) -> int:
    exit_code, ending = 0, ""
    recorder: RunRecorder | None = None
    try:
        prepared = run.prepared
        recorder = RunRecorder(
            prepared.config,
            prepared.plan,
            resume_step=run.found.step,
            identity=prepared.identity,
        )
        async with recorder:
            await _train(run, recorder, signals)
    except (StopRequested, asyncio.CancelledError):
        if not signals.received:
            raise
        exit_code, ending = signals.exit_code, f"stopped by {signals.name}"
    except RunTakenOverError:  # `_train` has reported it
        return 1  # write nothing more, and do not advise resuming: the run continues elsewhere
    except Exception as error:
        exit_code, ending = print_error(error), "failed"
    if recorder is not None:
        noted = _note_files(run)
        exit_code = exit_code or noted
        checkpoint = _last_checkpoint(run)
        command = run.resume_command
        for line in recorder.summarize(ending, resume_command=command, checkpoint=checkpoint):
            print(line)
    return exit_code


def _last_checkpoint(run: _Run) -> str:
    """Say from which checkpoint the run could be resumed."""
    try:
        steps = run.checkpoints.steps()
    except CheckpointError as error:
        return str(error)
    if not steps:
        return "no checkpoint was written: a resumed run starts at step 1 again"
    return f"the last checkpoint is of step {steps[-1]}"


def _note_files(run: _Run) -> int:
    try:
        run.claim.check()
        write_manifest(run.prepared.config.run_dir)
    except (OSError, OutputError) as error:
        return print_error(OutputError(f"{MANIFEST} was not written: {error}"))
    return 0


async def _train(run: _Run, recorder: RunRecorder, signals: StopSignals) -> None:
    prepared, config, found = run.prepared, run.prepared.config, run.found
    steps = f"steps {(found.step or 0) + 1} to {config.num_steps}"
    summary = f"{prepared.plan.summary()}; outputs in {config.run_dir}{run.page}"
    recorder.say(f"{config.name}: {steps}, {summary}")
    for line in (*prepared.notes, *found.passed_over):
        recorder.say(line)
    if config.checkpoint.resume:
        recorder.say(f"start: {prepared.describe_start(found.step)}")
    starting = [count(len(prepared.plan.replicas), "replica")] if prepared.plan.replicas else []
    if prepared.plan.teachers:
        starting.append(count(len(prepared.plan.teachers), "teacher replica"))
    starting += [] if prepared.plan.trainer is None else ["the trainer"]
    starting[-2:] = [" and ".join(starting[-2:])]
    recorder.say(f"starting {', '.join(starting)}; logs in {config.log_dir}")
    tokenizer = await asyncio.to_thread(load_tokenizer, prepared.policy_dir)
    vocab_size = read_architecture(prepared.policy_dir).vocab_size
    recorder.decode_by(tokenizer.decode, vocab_size=vocab_size)
    losses = FailureHandling(prepared, run.hosts, recorder, stop=signals.stop)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(losses.watching())
        with recorder.phase("start"):
            from torchtitan_rl.backends.monarch.run import run_processes  # seconds

            if config.monarch.telemetry:
                from torchtitan_rl.backends.monarch.telemetry import telemetry_pages

                url = await stack.enter_async_context(telemetry_pages(config.log_dir))
                add_to_launch(config.run_dir, telemetry=url)
                recorder.say(f"Monarch's telemetry: {url}")
            processes = await stack.enter_async_context(
                run_processes(prepared, trace_dir=recorder.trace_dir, hosts=run.hosts)
            )
        await stack.enter_async_context(scaling_socket(config.run_dir, losses))
        collect_less(full_after=5000)
        trainer = await stack.enter_async_context(losses.trainer(processes, run.claim))
        if run.recorded is not None:
            await train_on_recorded(run.recorded, prepared, trainer, recorder, signals)
            await _export(run, trainer, recorder)
            return
        recorder.take_fetches = processes.weights.take_fetches
        ledger = TokenLedger()
        reserved = reserved_replicas(config)
        router = GeneratorRouter(
            processes.replicas,
            on_ended=ledger.on_ended,
            request_timeout_s=config.request_timeout_s,
            sync_timeout_s=config.weight_sync.timeout_s,
            reserved=reserved,
            keeps_requests=True,
        )
        await stack.enter_async_context(losses.restarting(processes, router, reserved=reserved))
        places = _places(prepared)
        engines = recorder.engines = EngineSampler(router.stats, reserved=reserved)
        if places is not None:
            engines.on_reading = lambda stats: places.observe(stats, router.unreserved())
        await stack.enter_async_context(background(engines.run()))
        endpoint = None
        if processes.endpoint is not None:
            endpoint = await stack.enter_async_context(
                run_endpoint(
                    processes.endpoint,
                    router,
                    config.endpoint,
                    prepared.keys,
                    say=recorder.say,
                    on_failure=recorder.record_failure,
                )
            )
            recorder.take_endpoint = endpoint.take
            recorder.say(f"endpoint: {endpoint.host.base_url}")
        generation = Generation(
            config=config, router=router, tokenizer=tokenizer, endpoint=endpoint
        )
        rollouter = generation.rollouter(places=places)
        teachers = await _teachers(stack, prepared, processes, losses, recorder)
        parts = _parts(run, trainer, generation, rollouter, ledger, recorder, teachers)
        controller: Controller | SupervisedController
        if isinstance(config.task, SupervisedTask):
            supervision = supervision_of(config, tokenizer)
            controller = SupervisedController(config, parts, supervision, config.run_dir.absolute())
        else:
            controller = Controller(config, parts)
        recorder.take_now = controller.now

        def stop_cleanly() -> None:
            recorder.say(
                "stopping after this step, with a checkpoint; a second signal ends at once"
            )
            controller.request_stop()

        signals.stop_cleanly = stop_cleanly
        training = controller.run(resume_from=found if config.checkpoint.resume else None)
        try:
            await generation.with_endpoint(training)
            await _export(run, trainer, recorder)
        except RunTakenOverError as error:
            end_within(_TAKEN_OVER_S, print_error(error))
            raise


async def _export(run: _Run, trainer: Trainer, recorder: RunRecorder) -> None:
    if not run.prepared.config.checkpoint.export_hf:
        return
    run.claim.check()
    with recorder.phase("export"):
        await trainer.export_hf(run.prepared.config.run_dir.absolute() / "policy")


async def _teachers(
    stack: AsyncExitStack,
    prepared: PreparedRun,
    processes: RunProcesses,
    losses: FailureHandling,
    recorder: RunRecorder,
) -> Teachers | None:
    """The teachers of a run; None if it has none. Their lost replicas are started again while
    ``stack`` is open."""
    config, found = prepared.config.teacher, dict[str, Teacher]()
    for source, replicas in processes.teachers.items():
        router = GeneratorRouter(replicas, request_timeout_s=config.timeout_s)
        await stack.enter_async_context(losses.restarts(router))
        found[source] = ReplicaTeacher(source, router, num_top=config.num_top)
    for source, one in prepared.teachers.items():
        if one.model:
            found[source] = served = ServedTeacher(
                source,
                model=one.model,
                num_top=config.num_top,
                timeout_s=config.timeout_s,
                say=recorder.say,
            )
            stack.push_async_callback(served.close)
    if not found:
        return None
    vocab_size = read_architecture(prepared.policy_dir).vocab_size
    teachers = Teachers(found, config.source_for, vocab_size=vocab_size, num_top=config.num_top)
    recorder.take_teachers = teachers.take
    return teachers


def _places(prepared: PreparedRun) -> Places | None:
    config = prepared.config
    limit, generator = config.schedule.max_rollouts, config.generator
    if limit == "all":
        return None
    return Places(
        None if limit == "auto" else limit,
        at_first=max(1, generator.running_requests(prepared.plan.device) // 4),
        num_replicas=generator.replicas - len(reserved_replicas(config)),
    )


def _parts(
    run: _Run,
    trainer: Trainer,
    generation: Generation,
    rollouter: Rollouter,
    ledger: TokenLedger,
    recorder: RunRecorder,
    teachers: Teachers | None,
) -> Parts:
    config = generation.config
    return Parts(
        dataset=config.task.dataset("train", seed=config.seed),
        evaluation_problems=run.prepared.evaluation_problems,
        rollouter=rollouter,
        batcher=batcher_of(run.prepared, generation.tokenizer),
        trainer=trainer,
        router=generation.router,
        recorder=recorder,
        checkpoints=run.checkpoints,
        journal=run.journal,
        claim=run.claim,
        ledger=ledger,
        identity=run.prepared.identity,
        success_reward=config.task.success_reward(),
        examples=_examples(config, generation.tokenizer),
        teachers=teachers,
    )


def supervision_of(config: RunConfig, tokenizer: Any) -> Supervision:
    """Raises ConfigError if a file of a run on conversations cannot be read."""
    task = supervised_task(config)
    assert task is not None
    max_tokens = config.trainer.max_episode_tokens
    return Supervision(
        task=task,
        train=task.conversations(tokenizer, seed=config.seed, max_tokens=max_tokens),
        held_out=task.held_out_conversations(tokenizer, max_tokens=max_tokens),
    )


def _examples(config: RunConfig, tokenizer: Any) -> Callable[[int], TrainingBatch | None] | None:
    if not config.trainer.sft_coefficient:
        return None
    train = supervision_of(config, tokenizer).train
    return lambda step: packed(train.read(train.numbers(step))[0])


def reserved_replicas(config: RunConfig) -> tuple[str, ...]:
    """The last replica, if it is reserved for evaluation."""
    if not config.evaluation.reserves_replica:
        return ()
    return (replica_name(config.generator.replicas - 1),)
