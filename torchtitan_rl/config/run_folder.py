"""Where a run writes: whether its folder may have that name, can be made, and is free."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from torchtitan_rl.config.run import RunConfig

IDENTITY_FILE = "identity.json"  # of a run
SETTINGS_FILE = "settings.json"  # of an evaluation
_SIGNS_OF_A_RUN = ("metrics.jsonl", IDENTITY_FILE, "checkpoints")
_MAX_NAME_BYTES = 200  # file systems take 255, and temporary names are longer


def path_errors(config: RunConfig) -> list[str]:
    """One message per error; makes nothing that it does not remove."""
    if error := _name_error(config.name):
        return [error]
    run_dir = config.run_dir
    if cause := cannot_write(run_dir):
        return [f"output_dir is {config.output_dir}: {cause}; give another"]
    if not config.checkpoint.resume and any((run_dir / one).exists() for one in _SIGNS_OF_A_RUN):
        return [
            f"name is {config.name}: {run_dir} holds a run already; give another name, or "
            "--checkpoint.resume to continue it"
        ]
    return []


def cannot_write(directory: Path, name: str = "") -> str:
    """Why files (or one with this name) cannot be written into a directory, which need not exist;
    empty where they can.

    Permissions do not tell all (a read-only file system, /proc, names that are too long), so
    folders are made and removed again.
    """
    parent = existing_parent(directory)
    try:
        if not parent.is_dir():
            return f"{parent} is not a directory"
        probe = Path(tempfile.mkdtemp(prefix=".torchtitan-rl-", dir=parent))
    except OSError as error:
        return f"{parent} cannot be written to ({error.strerror})"
    try:
        inner = probe / directory.absolute().relative_to(parent) / name
        inner.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"it cannot be made in {parent} ({error.strerror})"
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    return ""


def output_file_errors(field: str, file: Path) -> list[str]:
    """Whether a file can be written that a field names."""
    if os.path.isdir(file):
        return [f"{field} is {file}: that is a directory; give a file"]
    if not os.path.isdir(file.parent):
        return [f"{field} is {file}: make its directory first"]
    if cause := cannot_write(file.parent, file.name):
        return [f"{field} is {file}: {cause}; give another"]
    return []


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _name_error(name: str) -> str:
    """A name is one folder under the output directory."""
    if name in ("", ".", "..") or "/" in name or name.strip() != name:
        return f"name is {name!r}: give the name of one folder, without slashes; see output_dir"
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        return f"name is {name[:20]}...: give at most {_MAX_NAME_BYTES} bytes"
    return ""
