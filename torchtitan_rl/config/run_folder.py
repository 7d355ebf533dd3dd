"""What a run's folder says about the run, read before it is resumed.

``identity.json`` is the identity that the run was last started with, so that a run that was killed
before its first checkpoint, and continues from its journal, can be compared too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.config.checks.paths import IDENTITY_FILE
from torchtitan_rl.config.manifest import MANIFEST
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.training.checkpoint_files import MARKER, read_document, replace_file
from torchtitan_rl.training.checkpoints import CheckpointDirectory

IDENTITY = "identity"  # its key in the document of a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """``checkpoint`` is the newest complete one; ``identity`` is None where none was saved."""

    checkpoint: Path | None
    step: int
    version: int = 0
    evaluated_step: int | None
    identity: dict[str, Any] | None


def find_resume_point(run_dir: Path) -> ResumePoint | None:
    """None where there is nothing to resume. Changes nothing."""
    directory = CheckpointDirectory(run_dir / "checkpoints")
    launched = _read_identity(run_dir / IDENTITY_FILE)
    for step in reversed(directory.steps()):
        try:
            document = read_document(directory.path(step)).get("extra") or {}
        except CheckpointError:  # it was removed or damaged just now
            continue
        return ResumePoint(
            checkpoint=directory.path(step),
            step=step,
            version=document.get("version", 0),
            evaluated_step=document.get("evaluated_step"),
            identity=document.get(IDENTITY) or launched,
        )
    if launched is None:
        return None
    return ResumePoint(checkpoint=None, step=0, evaluated_step=None, identity=launched)


def write_identity(run_dir: Path, identity: dict[str, Any]) -> None:
    """All or nothing.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(run_dir / IDENTITY_FILE, json.dumps(identity, indent=2).encode() + b"\n")


def is_complete(saved: ResumePoint, config: RunConfig) -> bool:
    """Whether nothing is left to do: all steps, the last evaluation, the export, and the list of
    all files. A run in which no step trained is never complete."""
    if saved.checkpoint is None or saved.step < config.num_steps or saved.version == 0:
        return False
    if not (config.run_dir / MANIFEST).is_file():
        return False
    if not config.checkpoint.export_hf:
        return config.evaluation.num_problems == 0 or saved.evaluated_step == saved.step
    exported = config.run_dir / "policy" / "config.json"  # written after the last checkpoint
    return exported.is_file() and (
        exported.stat().st_mtime >= (saved.checkpoint / MARKER).stat().st_mtime
    )


def _read_identity(path: Path) -> dict[str, Any] | None:
    try:
        identity = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return identity if isinstance(identity, dict) else None
