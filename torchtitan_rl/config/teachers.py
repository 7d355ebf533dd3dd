"""Finds the teachers of a run, and checks whether they fit its policy. Starts no process, but asks
the teachers' servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchtitan_rl.config.checks import expert_errors, generator_errors, head_errors
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.config.model import PolicyFacts, find_policy, resolve_checkpoint
from torchtitan_rl.config.resume import TEACHERS, policy_fingerprint
from torchtitan_rl.config.run import RunConfig, has_hosts
from torchtitan_rl.distillation.config import is_url, teacher_errors
from torchtitan_rl.distillation.server import check_server
from torchtitan_rl.environments.supervised import SupervisedTask
from torchtitan_rl.errors import ConfigError, TeacherError
from torchtitan_rl.rollout.rendering import load_tokenizer

_SHOWN = 3  # tokens in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTeacher:
    """A teacher: a checkpoint on this machine, or a ``model`` of a server."""

    directory: Path | None = None
    facts: PolicyFacts | None = None
    model: str = ""


def find_teachers(
    config: RunConfig, policy_dir: Path, policy: PolicyFacts, *, is_on_cpu: bool
) -> tuple[dict[str, FoundTeacher], list[str]]:
    """Return the teachers by their source, and one message per error."""
    parts = getattr(config.task, "tasks", {})
    errors = teacher_errors(
        config.teacher,
        config.rollout,
        parts=list(parts) if isinstance(parts, Mapping) else [],
    )
    if config.teacher.is_on and isinstance(config.task, SupervisedTask):
        errors.append(
            f"teacher is given: {type(config.task).__name__} samples nothing that a teacher could "
            "score; leave it out"
        )
    is_in_trainer = config.teacher.is_in_trainer
    if is_in_trainer and config.mode == "generate":
        errors.append(
            "teacher.loss is full: mode generate has no trainer that could ask the teacher; leave "
            "the teacher out"
        )
    if errors or (config.mode == "train" and not is_in_trainer):  # then the scores are recorded
        return {}, errors
    if config.teacher.checkpoints and has_hosts(config.launch):
        fix = ", and another teacher.loss" if is_in_trainer else ""
        return {}, [
            f"teacher.checkpoint is {config.teacher.checkpoints[0]}: a teacher's weights are on "
            "the controller's machine, and this run has its processes on other hosts; serve the "
            f"teacher (torchtitan-rl serve) and give teacher.url{fix}"
        ]
    found: dict[str, FoundTeacher] = {}
    for source in config.teacher.sources:
        field = _field(config, source)
        try:
            if is_url(source):
                found[source] = _served(config, source, policy_dir, policy)
                continue
            directory, facts = find_policy(source, field=field, is_trained=is_in_trainer)
            found[source] = FoundTeacher(directory=directory, facts=facts)
            if is_in_trainer:
                errors += _trainer_errors(config, facts, policy)
            else:
                errors += _engine_errors(config, facts, is_on_cpu=is_on_cpu)
            if cause := _difference(directory, facts, policy_dir, policy):
                errors.append(f"{field} is {source}: {cause}")
        except ConfigError as error:
            errors += [one.replace("policy.checkpoint: ", f"{field}: ", 1) for one in error.errors]
        except TeacherError as error:
            errors.append(f"{field} is {source}: {error}")
    return found, list(dict.fromkeys(errors))


def _field(config: RunConfig, source: str) -> str:
    given = {"checkpoint": config.teacher.checkpoint, "url": config.teacher.url}
    given |= {f"by_task.{part}": one for part, one in config.teacher.by_task.items()}
    return f"teacher.{next(name for name, one in given.items() if one == source)}"


def _served(config: RunConfig, url: str, policy_dir: Path, policy: PolicyFacts) -> FoundTeacher:
    tokenizer = load_tokenizer(policy_dir)
    model = check_server(
        url,
        model=config.teacher.model,
        vocab_size=min(policy.vocab_size, len(tokenizer)),
        max_tokens=config.rollout.max_total_tokens,
        decode=tokenizer.decode,
        num_top=config.teacher.num_top,
    )
    return FoundTeacher(model=model)


def _engine_errors(config: RunConfig, facts: PolicyFacts, *, is_on_cpu: bool) -> list[str]:
    """Errors in the fields of a teacher's engines. The other fields are those of the policy's
    engines, and are checked there."""
    engine = config.teacher.generator(config.generator, config.rollout.max_total_tokens)
    if engine.max_model_len > facts.max_positions:
        return [
            f"rollout.max_total_tokens is {config.rollout.max_total_tokens}: the teacher has "
            f"{facts.max_positions} positions, and a request for scores needs one more; give at "
            f"most {facts.max_positions - 1}"
        ]
    return [
        error.replace("generator.", "teacher.", 1)
        .replace("the policy", "the teacher")
        .replace("policy.checkpoint", "teacher.checkpoint")
        for error in generator_errors(engine, facts, is_on_cpu=is_on_cpu)
        if error.startswith(("generator.tensor_parallel", "generator.vllm", "policy.checkpoint"))
    ]


def _trainer_errors(config: RunConfig, facts: PolicyFacts, policy: PolicyFacts) -> list[str]:
    trainer, length = config.trainer, config.rollout.max_total_tokens
    errors = head_errors("trainer.tensor_parallel", trainer.tensor_parallel, facts)
    errors += expert_errors(trainer, facts, LoraConfig())
    errors = [error.replace("the policy", "the teacher") for error in errors]
    if length > facts.max_positions:
        errors.append(
            f"rollout.max_total_tokens is {length}: the teacher has {facts.max_positions} "
            f"positions; give at most {facts.max_positions}"
        )
    if trainer.context_parallel > 1:
        errors.append(
            f"trainer.context_parallel is {trainer.context_parallel}: the teacher of teacher.loss "
            "full is not split over tokens; give 1, or another teacher.loss"
        )
    if trainer.tensor_parallel > 1 and facts.vocab_size > policy.vocab_size:
        errors.append(
            f"trainer.tensor_parallel is {trainer.tensor_parallel}: the teacher has "
            f"{facts.vocab_size} tokens and the policy {policy.vocab_size}, which the ranks would "
            "split differently; give 1, or a teacher with as many tokens"
        )
    return errors


def teacher_identity(found: Mapping[str, FoundTeacher]) -> dict[str, list[str]]:
    """The part of a run's identity. Raises OSError or ValueError if a checkpoint cannot be read."""
    directories = [one.directory for one in found.values() if one.directory is not None]
    return {TEACHERS: [*map(policy_fingerprint, directories)]} if directories else {}


def recorded_teachers(config: RunConfig, identity: Mapping[str, object]) -> dict[str, FoundTeacher]:
    """The teachers in the trainer of a recorded run. Raises ConfigError if a checkpoint is missing,
    or is another one than in the run."""
    if not config.teacher.is_in_trainer:
        return {}
    field = "teacher.checkpoint"
    found = {
        source: FoundTeacher(directory=resolve_checkpoint(source, field=field))
        for source in config.teacher.sources
    }
    if teacher_identity(found)[TEACHERS] != identity.get(TEACHERS):
        raise ConfigError(f"{field} holds another model than in the run; restore it")
    return found


def _difference(directory: Path, facts: PolicyFacts, policy_dir: Path, policy: PolicyFacts) -> str:
    """Why a checkpoint cannot score the policy's tokens; empty if it can."""
    if facts.vocab_size < policy.vocab_size:
        return (
            f"its vocabulary has {facts.vocab_size} tokens and the policy's {policy.vocab_size}, "
            "so it cannot score every token; give a teacher with at least as many"
        )
    theirs, ours = _tokens(directory), _tokens(policy_dir)
    other = [text for text, token in ours.items() if theirs.get(text) != token]
    if not other:
        return ""
    return (
        f"it has another tokenizer than the policy: {len(other)} of the policy's {len(ours)} "
        f"tokens have another id or are missing, such as {other[:_SHOWN]}; give a teacher with "
        "the policy's tokenizer"
    )


@cache
def _tokens(directory: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return dict(tokenizer.get_vocab(with_added_tokens=True))
