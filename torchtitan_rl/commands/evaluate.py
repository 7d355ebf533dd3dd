"""``torchtitan-rl eval MODEL_OR_RUN... --config CONFIG [options]``: compares models on a task.

Each rollout is written when it ends, so the same command continues an evaluation that was killed.
Rollouts that were written are not run again, except failed ones. Exit codes: 0 done; 1 the
evaluation or some rollouts failed; 2 the configuration is wrong; 128 + n ended by signal n.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_rl.aio import background
from torchtitan_rl.commands.console import DryRun, StopSignals, print_error, run_command
from torchtitan_rl.commands.replicas import Generation, Replicas
from torchtitan_rl.commands.view import PageAddress, page_of_run
from torchtitan_rl.config.evaluate import (
    EvalConfig,
    EvalModel,
    PreparedEvaluation,
    has_export,
    note_export,
    prepare_evaluation,
    write_identity,
)
from torchtitan_rl.config.loader import load_config, parse_options, split_options
from torchtitan_rl.config.resume import MANIFEST, write_manifest
from torchtitan_rl.errors import CheckpointError, OutputError, TorchtitanRLError
from torchtitan_rl.files import replace_file
from torchtitan_rl.launch.lease import hold_run, unwritable
from torchtitan_rl.observability.console import Console, EvaluationState
from torchtitan_rl.observability.evaluation import (
    PICTURE_MISSING,
    Evaluated,
    EvaluationLog,
    can_draw,
    draw,
    read_finished,
    result_table,
    results,
)
from torchtitan_rl.observability.page_files import NowFile, write_launch
from torchtitan_rl.rollout.rollouter import describe_failures, finished_group, roll_out_problems
from torchtitan_rl.types import Rollout, RolloutGroup

_PROG = "torchtitan-rl eval"
_TABLE_WIDTH = 160  # if stdout is not a terminal


def main(words: Sequence[str]) -> int:
    page, others = PageAddress.of(words)
    dry_run, rest = DryRun.of(others)
    own, others = split_options(rest)
    options = parse_options(EvalConfig, own, prog=_PROG)
    with dry_run.planning():
        prepared = prepare_evaluation(options, load_config(Path(options.config), others))
    for line in prepared.run.notes:
        print(line, file=sys.stderr)
    if dry_run.is_wanted:
        return dry_run.show(_describe(prepared), _document(prepared))
    with ExitStack() as stack:
        serve_page = stack.enter_context(page_of_run(page))
        stack.enter_context(hold_run(prepared.folder))
        log_dir = prepared.run.config.log_dir
        try:
            (prepared.folder / MANIFEST).unlink(missing_ok=True)
            log_dir.mkdir(exist_ok=True)
            write_identity(prepared)
        except OSError as error:
            raise unwritable(prepared.folder, error) from error
        command = shlex.join([*_PROG.split(), *words])
        write_launch(
            prepared.folder,
            command=command,
            resume_command=command,
            plan=_describe(prepared).splitlines(),
            policy_dir=prepared.run.policy_dir,
        )
        url = serve_page(prepared.folder, log_dir)
        return run_command(
            partial(_run, prepared, url), log_dir=log_dir, when_stopped="the same command continues"
        )


def _describe(prepared: PreparedEvaluation) -> str:
    number = len(prepared.run.evaluation_problems)
    temperatures = ", ".join(f"{one:g}" for one in prepared.temperatures)
    return "\n".join(
        [
            *(f"model {model.name}: {model.path}" for model in prepared.models),
            f"temperatures: {temperatures}",
            f"rollouts: {prepared.samples} of each of {number} {prepared.options.split} problems, "
            f"{prepared.groups_at_once * prepared.samples} at a time",
            f"outputs: {prepared.folder}",
            prepared.run.plan.describe(),
        ]
    )


def _document(prepared: PreparedEvaluation) -> dict[str, Any]:
    return {
        "options": prepared.options,
        "configuration": prepared.run.config,
        "models": {model.name: model.path for model in prepared.models},
        "temperatures": prepared.temperatures,
        "num_problems": len(prepared.run.evaluation_problems),
        "samples": prepared.samples,
        "outputs": prepared.folder,
        "processes": prepared.run.plan,
    }


class ModelLostError(TorchtitanRLError):
    """A model can no longer be evaluated. The message names the model and the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One model at one temperature. ``kept`` are finished rollouts of an earlier call, by id;
    ``groups`` are the groups of this call."""

    model: EvalModel
    temperature: float
    file: Path
    kept: Mapping[str, Rollout]
    groups: tuple[RolloutGroup, ...]

    @property
    def name(self) -> str:
        return f"{self.model.name}, temperature {self.temperature:g}"

    @property
    def num_kept(self) -> int:
        return sum(len(group.rollouts) for group in self.groups)


async def _run(prepared: PreparedEvaluation, page: str, _: StopSignals) -> int:
    cells = await asyncio.to_thread(_cells, prepared)
    kept = sum(cell.num_kept for cell in cells)
    total = len(cells) * len(prepared.run.evaluation_problems) * prepared.samples
    state = EvaluationState(total, kept=kept)
    console = Console(prepared.options.progress, total=total, done=kept)
    with closing(console) as progress, closing(NowFile(prepared.folder, state.now)) as now:
        if page:
            progress.say(f"{prepared.folder.name}: {total} rollouts{page}")
        if kept:
            progress.say(f"{kept} of {total} rollouts are in {prepared.folder} and are kept")
        evaluated: list[Evaluated] = []
        lost: dict[str, ModelLostError] = {}
        async with background(now.run()), Replicas(prepared.run, progress.say) as replicas:
            for cell in cells:
                try:
                    evaluated.append(await _evaluate(prepared, cell, replicas, state, progress))
                except ModelLostError as error:  # the other models are still evaluated
                    lost[cell.model.name] = error
        progress.close()
        if evaluated:
            exit_code = _report(prepared, evaluated)
        return max(map(print_error, lost.values())) if lost else exit_code


def _cells(prepared: PreparedEvaluation) -> list[_Cell]:
    cells, split, samples = [], prepared.options.split, prepared.samples
    for model, temperature in itertools.product(prepared.models, prepared.temperatures):
        file = prepared.rollouts_file(model, temperature)
        kept = read_finished(file)
        groups = (
            finished_group(problem, kept, split=split, samples=samples)
            for problem in prepared.run.evaluation_problems
        )
        cells.append(
            _Cell(model=model, temperature=temperature, file=file, kept=kept, groups=tuple(groups))
        )
    return cells


async def _evaluate(
    prepared: PreparedEvaluation,
    cell: _Cell,
    replicas: Replicas,
    state: EvaluationState,
    progress: Console,
) -> Evaluated:
    groups = cell.groups
    if cell.num_kept < prepared.samples * len(groups):
        state.pause(f"loads {cell.model.name}")
        state.show_on(progress)
        await asyncio.to_thread(_export, prepared, cell.model)
        generation = await replicas.use(prepared.directory(cell.model))
        state.begin(cell.name)
        groups = await generation.run(_roll_out(prepared, cell, generation, state, progress))
    return Evaluated(model=cell.model.name, temperature=cell.temperature, groups=groups)


def _export(prepared: PreparedEvaluation, model: EvalModel) -> None:
    """Export a run's checkpoint to a Hugging Face directory, unless that exists, in the engines'
    dtype. Raises ModelLostError if files were removed or damaged since the command began."""
    fingerprint = prepared.identity["models"][model.name]
    target = prepared.directory(model)
    if not model.is_checkpoint:
        if not (model.path / "config.json").is_file():
            cause = f"{model.path} was removed"
            raise ModelLostError(f"{model.name} cannot be evaluated any more: {cause}")
        return
    if has_export(target, fingerprint):
        return
    from torchtitan_rl.backends.titan.hf import export_checkpoint  # seconds

    is_on_cpu = prepared.run.plan.device == "cpu"
    try:
        export_checkpoint(
            model.path,
            target,
            source=prepared.run.policy_dir,
            dtype="float32" if is_on_cpu else prepared.run.config.policy.dtype,
        )
        note_export(target, fingerprint)
    except (CheckpointError, OSError) as error:
        raise ModelLostError(f"{model.name} cannot be evaluated any more: {error}") from error


async def _roll_out(
    prepared: PreparedEvaluation,
    cell: _Cell,
    generation: Generation,
    state: EvaluationState,
    progress: Console,
) -> tuple[RolloutGroup, ...]:
    problems = prepared.run.evaluation_problems
    by_id = {problem.problem_id: problem for problem in problems}
    log = EvaluationLog(cell.file, step=cell.model.step, decode=generation.tokenizer.decode)

    def note(rollout: Rollout) -> None:
        version = generation.router.newest_version
        log.write(by_id[rollout.problem_id], rollout, version=version)
        state.end_rollout(rollout)
        state.show_on(progress)

    rollouter = generation.rollouter()
    state.activities = rollouter.activities
    try:
        return await roll_out_problems(
            rollouter,
            problems,
            split=prepared.options.split,
            samples=prepared.samples,
            seed=prepared.run.config.seed,
            temperature=cell.temperature,
            groups_at_once=prepared.groups_at_once,
            kept=cell.kept,
            on_rollout=note,
        )
    finally:
        log.close()


def _report(prepared: PreparedEvaluation, evaluated: Sequence[Evaluated]) -> int:
    from rich.console import Console

    task = prepared.run.config.task
    rows = results(evaluated, success_reward=task.success_reward())
    folder = prepared.folder
    document = {
        "config": prepared.options.config,
        "task": type(task).__name__,
        "split": prepared.options.split,
        "seed": prepared.run.config.seed,
        "success_reward": task.success_reward(),
        "models": {model.name: str(model.path) for model in prepared.models},
        "results": rows,
    }
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    console.print(result_table(rows, width=console.width))
    picture = folder / "results.png" if can_draw() else None
    try:
        text = json.dumps(document, indent=2) + "\n"
        replace_file(folder / "results.json", text.encode())
        if picture is not None:
            draw(picture, rows)
        write_manifest(folder)
    except OSError as error:
        raise OutputError(f"{folder}: {error}") from error
    print(f"results:  {folder / 'results.json'}")
    print(PICTURE_MISSING if picture is None else f"picture:  {picture}")
    print(f"rollouts: {prepared.rollout_files()}")
    failures = describe_failures([group for one in evaluated for group in one.groups])
    if not failures:
        return 0
    print(f"error: {failures}; the same command runs them again", file=sys.stderr)
    return 1
