"""What a run is, so that it is not continued as another one.

A checkpoint and the run's folder hold `run_identity`. A resumed run is compared with it: fields
that shape the data or the meaning of what is saved must be the same; all others may change, and
what changed is said. A field in neither list counts as one that must be the same.

`docs/training.md` has a table of both kinds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_rl.config.run import RunConfig

TASK = "task"
POLICY = "policy.fingerprint"
CONTENTS = " (contents)"
"""After the name of a field that is compared by another value (`Task.resume_identity`)."""

_MAY_CHANGE = (
    "num_steps",
    "pin_cores",
    "placement",
    "generator",
    "rollout.step_timeout_s",
    "rollout.rollout_timeout_s",
    "schedule.in_flight",
    "schedule.max_empty_batches",
    "schedule.report_wait_s",
    "schedule.max_wait_s",
    "weight_sync",
    "trainer.data_parallel_replicate",
    "trainer.data_parallel_shard",
    "trainer.tensor_parallel",
    "trainer.row_len",
    "trainer.rows_per_microbatch",
    "trainer.share_prefixes",
    "trainer.activation_checkpointing",
    "trainer.compile",
    "trainer.threads",
    "trainer.updates_per_batch",
    "trainer.step_timeout_s",
    "trainer.loss",
    "trainer.optimizer.learning_rate",
    "trainer.optimizer.warmup_steps",
    "trainer.optimizer.decay_steps",
    "trainer.optimizer.min_lr_factor",
    "trainer.optimizer.max_grad_norm",
    "evaluation",
    "checkpoint",
    "metrics",
    "endpoint",
    "launch",
)
_MUST_STAY = ("endpoint.tool_call_parser", "endpoint.reasoning_parser", "endpoint.chat_template")
_NOT_COMPARED = ("name", "output_dir", "checkpoint.resume", "policy.checkpoint")
_POLICY_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
_LONG_CHARS, _CONTEXT_CHARS = 200, 40  # of values in messages
_EDGE_BYTES = 1 << 16  # read of each end of a weight file; its header is at the front


def run_identity(config: RunConfig, policy_dir: Path) -> dict[str, Any]:
    """All fields of a run by dotted name, as JSON has them, and what its policy is.

    Raises:
        OSError, ValueError: the policy's files cannot be read.
    """
    identity = _flatten(config, "")
    # Older runs name the tasks of `experiments` without the package in front.
    module = type(config.task).__module__.removeprefix("torchtitan_rl.")
    identity[TASK] = f"{module}.{type(config.task).__qualname__}"
    identity[POLICY] = policy_fingerprint(policy_dir)
    loaded: dict[str, Any] = json.loads(json.dumps(identity))
    return loaded


def resume_errors(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Of two identities: one message for each field that differs and must not."""
    return [_error(name, saved, current) for name in _changed(saved, current) if not _is_free(name)]


def resume_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Of two identities: ``field: before -> now`` for each field that differs and may."""
    return [
        f"{name}: {saved[name]} -> {current[name]}"
        for name in _changed(saved, current)
        if _is_free(name)
    ]


def step_errors(done: int, config: RunConfig) -> list[str]:
    """Of a run that has taken ``done`` steps."""
    if done <= config.num_steps:
        return []
    return [f"num_steps is {config.num_steps}: the run has taken {done} steps; give at least that"]


def policy_fingerprint(policy_dir: Path) -> str:
    """A digest of architecture, tokenizer and weights. Of weight files, which may be large, names,
    sizes and both ends are read."""
    digest = hashlib.sha256()
    architecture = json.loads((policy_dir / "config.json").read_text())
    for name in _VOLATILE:
        architecture.pop(name, None)
    digest.update(json.dumps(architecture, sort_keys=True).encode())
    for name in _POLICY_FILES:
        path = policy_dir / name
        digest.update(path.read_bytes() if path.is_file() else b"\0")
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
    """Fields of another version of the program, which only one side has, are ignored; another
    task is one change, whatever its fields."""
    is_same_task = saved.get(TASK) == current.get(TASK)
    return [
        name
        for name in current
        if name in saved
        and saved[name] != current[name]
        and (is_same_task or not name.startswith(f"{TASK}."))
    ]


def _error(name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    if name == POLICY:
        return (
            "policy.checkpoint holds another model than the run began with; give that one, or "
            "another name to start anew"
        )
    now, before = _around_difference(str(current[name]), str(saved[name]))
    return (
        f"{name} is {now}: the run to be resumed has {before}; give that, or another name to start "
        "anew"
    )


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """Two texts that differ; of long ones the part in which they do.

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
            if contents[field.name] is not None:
                is_file = isinstance(contents[field.name], list)
                flat[f"{name}{CONTENTS if is_file else ''}"] = _plain(contents[field.name])
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
    """Dataclasses by name, or none yet."""
    return isinstance(value, dict) and all(
        dataclasses.is_dataclass(one) and not isinstance(one, type) for one in value.values()
    )


def _function_name(value: Any) -> str:
    if not inspect.isroutine(value):
        raise TypeError
    return f"{value.__module__}:{value.__qualname__}"


def _plain(value: Any) -> Any:
    """As JSON gives it back; functions by their names, what else it has no word for by its text."""
    try:
        return json.loads(json.dumps(value, default=_function_name))
    except (TypeError, ValueError):
        return repr(value)
