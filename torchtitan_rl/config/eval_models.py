"""Which models ``torchtitan-rl eval`` is given: directories in Hugging Face format, packages, the
checkpoints that a run keeps, or one of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.config.checks.paths import IDENTITY_FILE
from torchtitan_rl.config.checks.resume import POLICY, policy_fingerprint
from torchtitan_rl.config.policies import is_hub_name, resolve_checkpoint
from torchtitan_rl.config.policy_digest import policy_digest
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.training.checkpoint_files import MARKER
from torchtitan_rl.training.checkpoints import CheckpointDirectory, step_of

_FIELD = "MODEL_OR_RUN"
_EXPORT_OF = "checkpoint.txt"  # its fingerprint
_EXPORT = "policy"  # a run's export, and the usual name of an embedded policy


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalModel:
    """``name`` is also its folder in the output. ``path`` is a Hugging Face directory, or a run's
    checkpoint, from which one has to be made; ``fingerprint`` changes with its weights."""

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
    """Whether a directory holds the whole export of a checkpoint as it is now."""
    try:
        return (directory / _EXPORT_OF).read_text() == fingerprint
    except OSError:
        return False


def note_export(directory: Path, fingerprint: str) -> None:
    """The export of the checkpoint is complete."""
    (directory / _EXPORT_OF).write_text(fingerprint)


def find_models(given: Sequence[str], policy_dir: Path) -> tuple[EvalModel, ...]:
    """All models, in the order given; of a run, its kept checkpoints, or its export where it keeps
    none. ``policy_dir`` is the policy that the runs began with.

    Raises:
        ConfigError: one is nothing of this kind, or is given twice.
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
    """A checkpoint has weights alone: configuration and tokenizer are those of its policy."""
    try:
        expected = json.loads((run_dir / IDENTITY_FILE).read_text()).get(POLICY)
    except (OSError, ValueError, AttributeError):
        return
    if expected not in (None, policy_fingerprint(policy_dir)):
        raise ConfigError(
            f"policy.checkpoint is {policy_dir}: {run_dir} began with another model; give the "
            "configuration of that run, or its policy by --policy.checkpoint"
        )


def _name(directory: Path) -> str:
    directory = directory.absolute()
    if directory.name == _EXPORT:
        return f"{directory.parent.name}/{directory.name}"
    return directory.name
