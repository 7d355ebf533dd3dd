"""The options of ``torchtitan-rl eval``, their checks and its plan. Starts no process.

The task, the limits of rollouts and the replicas come from a run's configuration. A model is a
directory in Hugging Face format, a package, or a checkpoint of a run.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from tyro.conf import Positional, arg

from torchtitan_rl.agents.task import AgentTask, agent_errors
from torchtitan_rl.bounds import Positive, check_fields, field_errors
from torchtitan_rl.config.checks import generator_errors, start_notes
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.config.machine import machine_facts
from torchtitan_rl.config.model import find_policy, is_hub_name, resolve_checkpoint
from torchtitan_rl.config.plan import plan_serving
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.problems import evaluation_problems
from torchtitan_rl.config.resume import (
    CONTENTS,
    POLICY,
    TASK,
    policy_digest,
    policy_fingerprint,
    read_run_identity,
    run_identity,
)
from torchtitan_rl.config.room import serving_errors
from torchtitan_rl.config.run import (
    SETTINGS_FILE,
    File,
    RunConfig,
    cannot_write,
    has_hosts,
)
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.files import parse_object, replace_file
from torchtitan_rl.orchestration.config import MAY_BE_GREEDY
from torchtitan_rl.rollout.task import Split
from torchtitan_rl.serving.config import Keys
from torchtitan_rl.training.checkpoint_files import MARKER
from torchtitan_rl.training.checkpoints import CheckpointDirectory, step_of
from torchtitan_rl.types import Problem

_COMPARED = (
    TASK,
    "rollout.max_turns",
    "rollout.max_total_tokens",
    "rollout.sampling.max_tokens_per_turn",
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluate models on the task of a configuration.

    Options with a dot, such as ``--generator.replicas 2`` or ``--task.digits 3``, change the
    configuration; ``torchtitan-rl train CONFIG --help`` lists them. The same command again
    continues an evaluation that was stopped."""

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL_OR_RUN...")]
    """Models to evaluate: directories in Hugging Face format, names of models on the Hugging Face
    hub, ``package:NAME``, folders of runs (all their checkpoints), or single checkpoints
    (``outputs/NAME/checkpoints/step-000010``). Each model is compared with the first one."""
    config: str
    """A configuration file, or the name of a ready configuration, with the task."""
    samples: Positive | None = None
    """Rollouts of each problem: the k of avg@k and the largest k of pass@k. By default
    ``evaluation.samples_per_problem`` of the configuration."""
    problems: Positive | None = None
    """Number of problems, the first ones of the split. By default ``evaluation.num_problems``."""
    split: Split = "validation"
    """Which problems to use: ``validation`` or ``train``."""
    temperatures: tuple[Annotated[float, MAY_BE_GREEDY], ...] = ()
    """Sampling temperatures, each a row of the table: ``--temperatures 0 0.6 1.0``; 0 is greedy. By
    default ``evaluation.temperature``."""
    output: File | None = None
    """Folder for the results. By default ``outputs/eval/NAME``, where NAME is that of the
    configuration."""
    max_rollouts: Positive | None = None
    """Maximum number of rollouts that run at the same time. By default twice the number that the
    replicas can decode at the same time."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Console output; ``auto`` is ``rich`` on a terminal and ``plain`` elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """A checked evaluation that can start. ``run`` has the plan of the processes; its policy is
    the one with which the evaluated runs began."""

    options: EvalConfig
    run: PreparedRun
    models: tuple[EvalModel, ...]
    temperatures: tuple[float, ...]
    groups_at_once: int
    identity: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return self.run.config.run_dir

    @property
    def samples(self) -> int:
        return self.run.config.evaluation.samples_per_problem

    def rollouts_file(self, model: EvalModel, temperature: float) -> Path:
        return self.folder / model.name / f"temperature-{temperature:g}" / "rollouts.jsonl"

    def rollout_files(self) -> str:
        """The path of the file of rollouts; for several files, shell patterns that match all."""
        cells = [(model, one) for model in self.models for one in self.temperatures]
        files = [self.rollouts_file(model, temperature) for model, temperature in cells]
        if len(files) == 1:
            return str(files[0])
        depths = {len(file.relative_to(self.folder).parent.parts) for file in files}
        patterns = (self.folder.joinpath(*["*"] * depth, files[0].name) for depth in sorted(depths))
        return " ".join(map(str, patterns))

    def directory(self, model: EvalModel) -> Path:
        """The directory of the model in Hugging Face format; for a checkpoint, of its export."""
        return self.folder / model.name / "model" if model.is_checkpoint else model.path


def prepare_generation(config: RunConfig, *, num_rollouts: int) -> PreparedRun:
    """Check and plan a run's replicas without a trainer, and an endpoint if its task has agents.
    Raises ConfigError with all errors."""
    if has_hosts(config.launch):
        raise ConfigError(
            "launch.attach, launch.job, launch.hosts: only `train` uses several hosts; start this "
            "on each machine, with a part of the models or problems and an --output of its own"
        )
    check_fields(config)
    # Adapters of runs are merged into the models, which have replicas of their own.
    config = replace(
        config,
        policy=replace(config.policy, lora=LoraConfig()),
        generator=replace(config.generator, endpoint=""),
    )
    machine, keys = machine_facts(), Keys.of()
    policy_dir, policy = find_policy(config.policy.checkpoint)
    errors = [
        *generator_errors(config.generator, policy, is_on_cpu=not machine.cuda_devices),
        *serving_errors(config.generator, policy, machine, dtype=config.policy.dtype),
        *agent_errors(config.task, config.endpoint, num_rollouts=num_rollouts),
        *config.task.errors(),
    ]
    total = config.rollout.max_total_tokens
    if total > config.generator.max_model_len:
        errors.append(
            f"rollout.max_total_tokens is {total}: give at most generator.max_model_len "
            f"({config.generator.max_model_len})"
        )
    if errors:
        raise ConfigError(errors)
    plan = plan_serving(
        config.generator,
        config.endpoint if isinstance(config.task, AgentTask) else None,
        devices=machine.cuda_devices,
        seed=config.seed,
    )
    notes = start_notes(
        config.task,
        step_timeout_s=config.rollout.step_timeout_s,
        num_rollouts=num_rollouts,
        num_cores=machine.num_cores,
    )
    return PreparedRun(
        config=config, policy_dir=policy_dir, plan=plan, keys=keys, notes=tuple(notes)
    )


def prepare_evaluation(options: EvalConfig, config: RunConfig) -> PreparedEvaluation:
    """Check everything, find the models and plan the processes. Raises ConfigError with all errors
    of the first kind of check that fails."""
    if errors := _option_errors(options):
        raise ConfigError(errors)
    check_fields(config)
    folder = (options.output or Path("outputs/eval") / config.name).absolute()
    config = replace(
        config,
        output_dir=folder.parent,
        name=folder.name,
        rollout=replace(config.rollout, group_size=max(2, options.samples or 0)),
        evaluation=replace(
            config.evaluation,
            num_problems=options.problems or config.evaluation.num_problems,
            samples_per_problem=options.samples or config.evaluation.samples_per_problem,
        ),
    )
    samples, generator = config.evaluation.samples_per_problem, config.generator
    device: Literal["cpu", "cuda"] = "cuda" if machine_facts().cuda_devices else "cpu"
    running = generator.replicas * generator.running_requests(device)
    at_once = options.max_rollouts or 2 * running
    if isinstance(config.task, AgentTask) and options.max_rollouts is None:
        at_once = min(at_once, config.endpoint.max_concurrent_requests)
    if options.max_rollouts and options.max_rollouts < samples:
        raise ConfigError(
            f"--max-rollouts is {options.max_rollouts}: the {samples} samples of a problem run "
            f"together; give at least {samples}, or fewer --samples"
        )
    groups_at_once = max(1, at_once // samples)
    run = prepare_generation(config, num_rollouts=groups_at_once * samples)
    models = find_models(options.models, run.policy_dir)
    if errors := _model_errors(models, run):
        raise ConfigError(errors)
    problems = evaluation_problems(config, options.split, option="--problems")
    if not problems:
        raise ConfigError("evaluation.num_problems is 0: give --problems")
    prepared = PreparedEvaluation(
        options=options,
        run=replace(run, evaluation_problems=problems),
        models=models,
        temperatures=options.temperatures or (config.evaluation.temperature,),
        groups_at_once=groups_at_once,
        identity=_identity(config, run.policy_dir, models, options.split, problems),
    )
    if errors := _folder_errors(prepared):
        raise ConfigError(errors)
    return prepared


def _option_errors(options: EvalConfig) -> list[str]:
    errors = list(field_errors(options, "--").values())
    if not options.models:
        errors.append("MODEL_OR_RUN: give at least one")
    if len({f"{one:g}" for one in options.temperatures}) < len(options.temperatures):
        errors.append("--temperatures: one is given twice; give each one once")
    return errors


def _model_errors(models: tuple[EvalModel, ...], run: PreparedRun) -> list[str]:
    errors = []
    for model in models:
        if not model.is_checkpoint and model.path != run.policy_dir:
            _, facts = find_policy(str(model.path), field="MODEL_OR_RUN")
            is_on_cpu = run.plan.device == "cpu"
            found = generator_errors(run.config.generator, facts, is_on_cpu=is_on_cpu)
            errors += [f"MODEL_OR_RUN {model.name}: {error}" for error in found]
    return errors


def _identity(
    config: RunConfig,
    policy_dir: Path,
    models: tuple[EvalModel, ...],
    split: Split,
    problems: Sequence[Problem],
) -> dict[str, Any]:
    """Everything on which the rollouts in a folder depend, except the temperature. The identity
    has digests of the evaluated problems instead of the contents of data files."""
    fields = run_identity(config, policy_dir)
    compared = {
        name: value
        for name, value in fields.items()
        if name in _COMPARED or (name.startswith(f"{TASK}.") and not name.endswith(CONTENTS))
    }
    return {
        "fields": compared | {"--split": split},
        "models": {model.name: model.fingerprint for model in models},
        "problems": {problem.problem_id: _digest(problem) for problem in problems},
    }


def _digest(problem: Problem) -> str:
    data = json.dumps(problem.data, sort_keys=True, default=str)
    return xxhash.xxh3_64_hexdigest(data.encode(errors="surrogatepass"))


def _folder_errors(prepared: PreparedEvaluation) -> list[str]:
    folder = prepared.folder
    if cause := cannot_write(folder):
        return [f"--output is {folder}: {cause}; give another"]
    saved = read_identity(folder)
    fix = f"{folder} has rollouts of another evaluation; give another --output"
    changed = [
        f"{name} is {value}, and was {saved['fields'][name]}: {fix}"
        for name, value in prepared.identity["fields"].items()
        if saved["fields"].get(name, value) != value
    ]
    changed += [
        f"MODEL_OR_RUN: {name} was another model: {fix}"
        for name, fingerprint in prepared.identity["models"].items()
        if saved["models"].get(name, fingerprint) != fingerprint
    ]
    others = [
        problem_id
        for problem_id, digest in prepared.identity["problems"].items()
        if saved["problems"].get(problem_id, digest) != digest
    ]
    if others and not changed:  # a changed field or model would be the cause
        number = f"{len(others)} problems have" if len(others) > 1 else "a problem has"
        changed.append(f"task: {number} changed, the first one is {others[0]}: {fix}")
    return changed


def read_identity(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the identities that `write_identity` wrote; empty if there is no file."""
    saved: dict[str, dict[str, Any]] = {"fields": {}, "models": {}, "problems": {}}
    with suppress(OSError, ValueError):
        saved |= parse_object(SETTINGS_FILE, (folder / SETTINGS_FILE).read_bytes())
    return saved


def write_identity(prepared: PreparedEvaluation) -> None:
    """Add this evaluation's identity to the folder's file. Raises OSError."""
    saved = read_identity(prepared.folder)
    merged = {kind: saved[kind] | prepared.identity[kind] for kind in saved}
    text = json.dumps(merged, indent=2) + "\n"
    replace_file(prepared.folder / SETTINGS_FILE, text.encode())


_FIELD = "MODEL_OR_RUN"
_EXPORT_OF = "checkpoint.txt"  # file with the fingerprint of the exported checkpoint
_EXPORT = "policy"  # folder of a run's export, and usually of an embedded policy


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalModel:
    """A model to evaluate. ``name`` is also the name of its folder in the output. ``path`` is a
    Hugging Face directory, or a run's checkpoint, which must be exported first. ``fingerprint``
    changes with the weights."""

    name: str
    path: Path
    step: int = 0
    is_checkpoint: bool = False

    @property
    def fingerprint(self) -> str:
        if not self.is_checkpoint:
            return policy_digest(self.path)
        return hashlib.sha256((self.path / MARKER).read_bytes()).hexdigest()


def has_export(directory: Path, fingerprint: str) -> bool:
    """Whether a directory has the complete export of the checkpoint with this fingerprint."""
    try:
        return (directory / _EXPORT_OF).read_text() == fingerprint
    except OSError:
        return False


def note_export(directory: Path, fingerprint: str) -> None:
    """Record in ``directory`` that the export of a checkpoint is complete."""
    (directory / _EXPORT_OF).write_text(fingerprint)


def find_models(given: Sequence[str], policy_dir: Path) -> tuple[EvalModel, ...]:
    """Find all models, in the given order. For a run, these are its kept checkpoints, or its export
    if it keeps no checkpoint. ``policy_dir`` is the policy with which the runs began.

    Raises:
        ConfigError: a word does not name a model, or a model is given twice.
    """
    models: list[EvalModel] = []
    errors: list[str] = []
    for text in given:
        try:
            models += _find(text, policy_dir)
        except ConfigError as error:
            errors += error.errors
    for name, count in Counter(one.name for one in models).items():
        if count > 1:
            errors.append(f"{_FIELD}: {count} models are named {name}; give each one once")
    if errors:
        raise ConfigError(errors)
    return tuple(models)


def _find(text: str, policy_dir: Path) -> list[EvalModel]:
    path = Path(text)
    if text.startswith("package:") or (path / "config.json").is_file():
        directory = resolve_checkpoint(text, field=_FIELD)
        name = text.removeprefix("package:") if text.startswith("package:") else _name(directory)
        return [EvalModel(name=name, path=directory)]
    path = path.absolute()
    if (path / MARKER).is_file():
        _require_policy(path.parent.parent, policy_dir)
        return [_of_checkpoint(path)]
    directory = path / "checkpoints"
    if steps := CheckpointDirectory(directory).steps():
        _require_policy(path, policy_dir)
        return [_of_checkpoint(CheckpointDirectory(directory).path(step)) for step in steps]
    if (path / _EXPORT / "config.json").is_file():
        return [EvalModel(name=_name(path / _EXPORT), path=path / _EXPORT)]
    if is_hub_name(text):
        return [EvalModel(name=text, path=resolve_checkpoint(text, field=_FIELD))]
    raise ConfigError(
        f"{_FIELD} is {text}: it is neither a Hugging Face directory nor a run with a checkpoint; "
        "give a directory with config.json, package:NAME, a model's name on the Hugging Face hub, "
        "a run's folder, or one of its checkpoints"
    )


def _of_checkpoint(path: Path) -> EvalModel:
    run_dir = path.parent.parent
    name = f"{run_dir.name}/{path.name}"
    return EvalModel(name=name, path=path, step=step_of(path), is_checkpoint=True)


def _require_policy(run_dir: Path, policy_dir: Path) -> None:
    """Require that a run began with this policy. The run's checkpoints have only weights, so
    configuration and tokenizer of the evaluated models come from this policy."""
    identity = read_run_identity(run_dir) or {}
    if identity.get(POLICY) not in (None, policy_fingerprint(policy_dir)):
        raise ConfigError(
            f"policy.checkpoint is {policy_dir}: {run_dir} began with another model; give the "
            "configuration of that run, or its policy by --policy.checkpoint"
        )


def _name(directory: Path) -> str:
    directory = directory.absolute()
    if directory.name == _EXPORT:
        return f"{directory.parent.name}/{directory.name}"
    return directory.name
