"""The identity of a run, with which a resumed run is compared; and the manifest of a run's files.

Each checkpoint and the run's folder have a `run_identity`. In a resumed run, the fields that shape
the data or the meaning of saved state must have the same values as before. All other fields may
change, and a note lists the changes. A field that is not known to be free to change must be the
same; `docs/training.md` has a table of both kinds.

``manifest.json`` has the size and the checksum of each file that a finished run or evaluation has
written. It is written, atomically, after the last change in the folder, and removed before the next
change. So a folder without a manifest belongs to a run that is running or was killed. For a
checkpoint, the manifest lists only the checkpoint's marker. The marker lists the checkpoint's
files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_rl.config.lora import ADAPTER_FOLDER
from torchtitan_rl.config.run import IDENTITY_FILE, SETTINGS_FILE, RunConfig
from torchtitan_rl.environments.supervised import SupervisedTask
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.files import parse_object, replace_file
from torchtitan_rl.images import PREPROCESSOR_CONFIG
from torchtitan_rl.launch.lease import lock_errors
from torchtitan_rl.orchestration.checkpointing import read_position
from torchtitan_rl.training.checkpoint_files import MARKER, fingerprint
from torchtitan_rl.training.checkpoints import CheckpointDirectory

TASK = "task"
POLICY = "policy.fingerprint"
TEACHERS = "teacher.fingerprints"
CONTENTS = " (contents)"
"""A suffix for the name of a field that names files. The field is compared by the contents of these
files, see `Task.resume_identity`."""

_SECTIONS = {  # the fields of each section that may change; a section's name stands for all of them
    "": (
        "num_steps pin_cores placement generator weight_sync evaluation checkpoint metrics profile "
        "held_out endpoint launch monarch"
    ),
    "teacher.": "url model coefficient replicas tensor_parallel vllm timeout_s",
    "rollout.": "step_timeout_s rollout_timeout_s",
    "schedule.": "during_training max_rollouts max_empty_batches report_wait_s max_wait_s",
    "trainer.": (
        "data_parallel_replicate data_parallel_shard context_parallel tensor_parallel "
        "expert_parallel max_episode_tokens max_tokens_per_microbatch share_prefixes "
        "activation_checkpointing compile threads updates_per_batch sft_coefficient step_timeout_s "
        "max_restarts loss"
    ),
    "trainer.optimizer.": "learning_rate warmup_steps decay_steps min_lr_factor max_grad_norm",
}
_MAY_CHANGE = [section + name for section, names in _SECTIONS.items() for name in names.split()]
_MUST_STAY = ("endpoint.tool_call_parser", "endpoint.reasoning_parser", "endpoint.chat_template")
_OF_ROLLOUTS = (
    "rollout",  # rollout.* and rollouts
    "schedule.",
    "generator.",
    "weight_sync.",
    "evaluation.",
    "endpoint.",
    "placement",
    "trainer.loss.",
    "trainer.updates_per_batch",
    "trainer.sft_coefficient",
    "examples.",  # those in steps of reinforcement learning; the task has its own
)
_NOT_COMPARED = ("name", "output_dir", "checkpoint.resume", "policy.checkpoint")
_POLICY_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_CHECKPOINTS = {POLICY: "policy.checkpoint", TEACHERS: "teacher.checkpoint or teacher.by_task"}
_VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
_LONG_CHARS, _CONTEXT_CHARS = 200, 40  # lengths of values in messages
_EDGE_BYTES = 1 << 16  # bytes read at each end of a weight file; its header is at the front


def run_identity(config: RunConfig, policy_dir: Path) -> dict[str, Any]:
    """All fields of a run by dotted name, in JSON types, and the fingerprint of its policy.

    Raises:
        OSError, ValueError: the policy's files cannot be read.
    """
    return run_fields(config) | {POLICY: policy_fingerprint(policy_dir)}


def run_fields(config: RunConfig) -> dict[str, Any]:
    """All fields of a run by dotted name, in JSON types."""
    identity = _flatten(config, "")
    if isinstance(config.task, SupervisedTask):
        identity = _of_supervised(identity, config.task.section)
    # Older runs name the tasks of `experiments` without the package's name.
    module = type(config.task).__module__.removeprefix("torchtitan_rl.")
    identity[TASK] = f"{module}.{type(config.task).__qualname__}"
    loaded: dict[str, Any] = json.loads(json.dumps(identity))
    return loaded


def _of_supervised(identity: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Leave out what a run on conversations does not read. Name the other fields as its own
    configuration does (`config/supervised.py`)."""
    names = {
        name: name.replace(f"{TASK}.data.", f"{section}.").removeprefix(f"{TASK}.")
        for name in identity
        if not name.startswith(_OF_ROLLOUTS)
    }
    return {new: identity[old] for old, new in names.items()}


def resume_errors(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Compare two identities: one message for each field that differs but must be the same."""
    return [_error(name, saved, current) for name in _changed(saved, current) if not _is_free(name)]


def resume_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """``field: before -> now`` for each field that differs and may differ."""
    return [
        f"{name}: {saved[name]} -> {current[name]}"
        for name in _changed(saved, current)
        if _is_free(name)
    ]


def policy_fingerprint(policy_dir: Path) -> str:
    """A digest of architecture, tokenizer and weights. Of weight files, which may be large, only
    names, sizes and both ends are read."""
    digest = hashlib.sha256()
    architecture = json.loads((policy_dir / "config.json").read_text())
    for name in _VOLATILE:
        architecture.pop(name, None)
    digest.update(json.dumps(architecture, sort_keys=True).encode())
    for name in _POLICY_FILES:
        path = policy_dir / name
        digest.update(path.read_bytes() if path.is_file() else b"\0")
    if (images := policy_dir / PREPROCESSOR_CONFIG).is_file():
        digest.update(images.read_bytes())
    for path in weight_files(policy_dir):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(0, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()


def weight_files(policy_dir: Path) -> list[Path]:
    return sorted(policy_dir.glob("*.safetensors"))


def _changed(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The fields that differ. A field that only one of the two identities has is ignored: another
    version of the program wrote one of them. A different task counts as one change."""
    is_same_task = saved.get(TASK) == current.get(TASK)
    return [
        name
        for name in current
        if name in saved
        and saved[name] != current[name]
        and (is_same_task or not name.startswith(f"{TASK}."))
    ]


def _error(name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    if name in _CHECKPOINTS:
        return (
            f"{_CHECKPOINTS[name]} holds another model than the run began with; give that one, or "
            "another name to start a new run"
        )
    now, before = _around_difference(str(current[name]), str(saved[name]))
    return (
        f"{name} is {now}: the run to be resumed has {before}; give that, or another name to start "
        "a new run"
    )


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """Shorten two long texts to the part in which they differ.

    >>> _around_difference("a" * 500 + "b" + "c" * 500, "a" * 501 + "c" * 500)[0]
    '...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaabcccccccccccccccccccccccccccccccccccccccc...'
    """
    if max(len(one), len(other)) <= _LONG_CHARS:
        return one, other
    pairs = enumerate(zip(one, other, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    first = max(0, same - _CONTEXT_CHARS)
    first_mark = "..." if first else ""

    def cut(text: str) -> str:
        end = same + _CONTEXT_CHARS + 1
        return f"{first_mark}{text[first:end]}{'...' if len(text) > end else ''}"

    return cut(one), cut(other)


def _is_free(name: str) -> bool:
    is_listed = any(name == one or name.startswith(f"{one}.") for one in _MAY_CHANGE)
    return is_listed and name not in _MUST_STAY


def _flatten(config: Any, prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    contents = config.resume_identity() if hasattr(config, "resume_identity") else {}
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if name in _NOT_COMPARED:
            continue
        if field.name in contents:
            if (content := contents[field.name]) is not None:
                flat[name + CONTENTS * isinstance(content, list)] = _plain(content)
            continue
        if dataclasses.is_dataclass(value):
            flat |= _flatten(value, f"{name}.")
            continue
        if _are_parts(value):
            flat[f"{name} (types)"] = [
                f"{part}: {type(one).__name__}" for part, one in value.items()
            ]
            for part, one in value.items():
                flat |= _flatten(one, f"{name}.{part}.")
        if not value or not _are_parts(value):
            flat[name] = _plain(value)
    return flat


def _are_parts(value: Any) -> bool:
    """Whether a value is a dictionary of dataclasses by name, or an empty dictionary."""
    return isinstance(value, dict) and all(
        dataclasses.is_dataclass(one) and not isinstance(one, type) for one in value.values()
    )


def _function_name(value: Any) -> str:
    if not inspect.isroutine(value):
        raise TypeError
    return f"{value.__module__}:{value.__qualname__}"


def _plain(value: Any) -> Any:
    """Convert to JSON types: functions to their names, and other values that JSON cannot express to
    text."""
    try:
        return json.loads(json.dumps(value, default=_function_name))
    except (TypeError, ValueError):
        return repr(value)


MANIFEST = "manifest.json"
_LISTED = (
    IDENTITY_FILE,
    SETTINGS_FILE,
    "results.json",
    "metrics*.jsonl",
    "**/rollouts*.jsonl",
    "failures*.jsonl",
    "journal.sqlite",
    f"checkpoints/*/{MARKER}",
    "policy/**/*",
    f"{ADAPTER_FOLDER}/*",
)
FIXES = {
    "policy/": "restore it, or remove policy/ and resume the run, which exports it again",
    f"{ADAPTER_FOLDER}/": "restore it, or remove policy/ and resume the run, which exports both",
    "checkpoints/": "restore the checkpoint; resumed without it, a run continues from an older one",
}
_FIX = "restore it from a copy"


def write_manifest(folder: Path) -> None:
    """Raises OSError if a file cannot be read, or the manifest cannot be written."""
    files = {name: asdict(fingerprint(folder / name)) for name in _listed(folder)}
    document = {"files": files, "crc32": _checksum(files)}
    replace_file(folder / MANIFEST, json.dumps(document, indent=2).encode() + b"\n")


def compare_with_manifest(folder: Path) -> tuple[int, list[str]]:
    """The number of files in the manifest, and a line for each file that was changed, added or
    removed since the manifest was written; (0, []) if there is no manifest.

    Raises:
        OSError: a file cannot be read.
    """
    try:
        document = parse_object(MANIFEST, (folder / MANIFEST).read_bytes())
        files: dict[str, Any] = document["files"]
        if document["crc32"] != _checksum(files):
            raise ValueError("wrong checksum")
    except FileNotFoundError:
        return 0, []
    except (ValueError, KeyError, TypeError) as error:
        return 0, [f"{MANIFEST} is damaged ({error!r}): {_FIX}"]
    found = _listed(folder)
    errors = [f"{name} was added after the end: remove it" for name in found if name not in files]
    for name, record in files.items():
        fix = next((fix for start, fix in FIXES.items() if name.startswith(start)), _FIX)
        if name not in found:
            errors.append(f"{name} was removed after the end: {fix}")
        elif asdict(fingerprint(folder / name)) != record:
            errors.append(f"{name} was changed after the end: {fix}")
    return len(files), errors


def _listed(folder: Path) -> list[str]:
    paths = {path for pattern in _LISTED for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _checksum(files: Any) -> int:
    return zlib.crc32(json.dumps(files).encode())


LEAST_BYTES_PER_S = 200 << 20  # assumed minimum read speed of the storage of weights


def policy_digest(policy_dir: Path) -> str:
    """A digest of a whole policy, which hosts and evaluations compare. Reads the weight files
    completely, at about 5 GB/s if they are in memory; within a process, a file is read again only
    if it has changed.

    Raises:
        OSError, ValueError: the policy's files cannot be read.
    """
    digest = hashlib.sha256(policy_fingerprint(policy_dir).encode())
    for path in weight_files(policy_dir):
        found = path.stat()
        digest.update(_file_digest(os.path.realpath(path), found.st_size, found.st_mtime_ns))
    return digest.hexdigest()


def digest_limit_s(policy_dir: Path) -> float:
    """How long `policy_digest` may take on another host, in seconds. Raises OSError."""
    return sum(path.stat().st_size for path in weight_files(policy_dir)) / LEAST_BYTES_PER_S


@lru_cache(maxsize=1024)
def _file_digest(path: str, size: int, mtime_ns: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()


def compare_with_saved(
    config: RunConfig, identity: dict[str, Any]
) -> tuple[ResumePoint | None, list[str], list[str]]:
    """Find the point from which the run can be resumed, and compare the configuration with it.
    Returns the point (None: nothing to resume), the errors and the notes."""
    run_dir = config.run_dir
    if held := lock_errors(run_dir):
        return None, held, []
    saved = find_resume_point(run_dir) if config.checkpoint.resume else None
    if saved is None:
        return None, [], []
    before, notes = dict(saved.identity or {}), []
    if not before:
        notes.append(f"{run_dir} does not say what the run was: its configuration is not compared")
    if changes := resume_changes(before, identity):
        since = "the checkpoint" if saved.checkpoint else "the run's last start"
        notes.append(f"changed since {since}: {', '.join(changes)}")
    if past := [step for step in config.profile.steps if step <= saved.version]:
        notes.append(
            f"profile.steps: {', '.join(map(str, past))} not profiled, because the checkpoint has "
            f"version {saved.version}"
        )
    if is_complete(saved, config):
        notes.append(
            f"{run_dir} is complete: all {saved.step} steps are done; give more by --num-steps"
        )
    errors = resume_errors(before, identity)
    if (done := saved.step) > config.num_steps:
        what = f"num_steps is {config.num_steps}"
        errors.append(f"{what}: the run has taken {done} steps; give at least that")
    return saved, errors, notes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The point from which a run can be resumed. ``checkpoint`` is the newest complete checkpoint;
    None: the run has none. ``identity`` is None if none was saved."""

    checkpoint: Path | None
    step: int
    version: int = 0
    evaluated_step: int | None
    identity: dict[str, Any] | None


def find_resume_point(run_dir: Path) -> ResumePoint | None:
    """The point from which the run in ``run_dir`` can be resumed; None if there is nothing to
    resume. Changes nothing."""
    directory = CheckpointDirectory(run_dir / "checkpoints")
    launched = read_run_identity(run_dir)
    for step in reversed(directory.steps()):
        try:
            position = read_position(directory.path(step))
        except CheckpointError:  # damaged, or just removed
            continue
        return ResumePoint(
            checkpoint=directory.path(step),
            step=step,
            version=position.version,
            evaluated_step=position.evaluated_step,
            identity=dict(position.identity) or launched,
        )
    if launched is None:
        return None
    return ResumePoint(checkpoint=None, step=0, evaluated_step=None, identity=launched)


def read_run_identity(run_dir: Path) -> dict[str, Any] | None:
    """Read what `write_identity` wrote; None if the file is missing or damaged."""
    try:
        return parse_object(IDENTITY_FILE, (run_dir / IDENTITY_FILE).read_bytes())
    except (OSError, ValueError):
        return None


def write_identity(run_dir: Path, identity: dict[str, Any]) -> None:
    """Replace the file atomically. Raises OSError."""
    replace_file(run_dir / IDENTITY_FILE, json.dumps(identity, indent=2).encode() + b"\n")


def is_complete(saved: ResumePoint, config: RunConfig) -> bool:
    """Whether nothing is left to do: all steps, the last evaluation, the export and the manifest
    are done. A run in which no step trained is never complete."""
    if saved.checkpoint is None or saved.step < config.num_steps:
        return False
    if saved.version == 0 and config.mode != "generate":
        return False
    if not (config.run_dir / MANIFEST).is_file():
        return False
    if not config.checkpoint.export_hf:
        return config.evaluation.num_problems == 0 or saved.evaluated_step == saved.step
    exported = config.run_dir / "policy" / "config.json"  # written after the last checkpoint
    return exported.is_file() and (
        exported.stat().st_mtime >= (saved.checkpoint / MARKER).stat().st_mtime
    )
