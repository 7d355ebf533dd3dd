"""The profile of a run: how long its parts took, from its records, for `simulate`.

| part | from |
|---|---|
| rollouts: prompts, lengths, delays, rewards | ``rollouts.jsonl`` |
| decoding, as a function of the requests that run together | the timings of its turns |
| steps of the trainer, publishing, weight syncs | ``metrics.jsonl`` |
| lost replicas and their return | ``failures.jsonl``, traces |

Decoding: a step with ``r`` requests takes ``step_s + r * request_s``, fitted to the time per token
of the turns by least squares, without negative terms. This time contains what the prompts of other
requests took, as often as in the run. A request waits ``r * first_token_s`` longer for its first
token than for others, in an engine with room. The first step of the run, in which everything warms
up, is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from torchtitan_rl.bounds import MAX_COUNT, MAX_SECONDS
from torchtitan_rl.errors import ConfigError, OutputError, one_line
from torchtitan_rl.failures import Part
from torchtitan_rl.files import parse_object, replace_file, whole_lines
from torchtitan_rl.observability.failures import read_failures
from torchtitan_rl.observability.recorded import RecordedRun, read_recorded, value_in
from torchtitan_rl.observability.rollouts import read_rollouts
from torchtitan_rl.observability.sinks import Row, Split, step_in
from torchtitan_rl.types import CompletionMetrics, Rollout

_MAX_GROUPS = 512  # kept of a run, spread over its steps

_LEAST_TOKEN_S = 1e-9
_OF_ROLLOUTS = ("rollout.max_", "rollout.sampling.")  # what decides about turns and lengths
_TRAINER_RANKS = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")

_Time = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
_Times = Annotated[tuple[_Time, ...], Meta(min_length=1)]
_Tokens = Annotated[int, Meta(ge=0, le=1 << 24)]
_Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurns:
    """One rollout. ``environment_s``: seconds of the environment before the first turn and after
    each turn, those of the reward included."""

    prompt_tokens: tuple[_Tokens, ...]
    sampled_tokens: Annotated[tuple[_Tokens, ...], Meta(min_length=1)]
    environment_s: tuple[_Time, ...]
    reward: float | None
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """``error``: mean absolute deviation of a time per token from the fit, divided by the mean.
    ``by_concurrency``: requests that ran together (at most), median seconds per token, and the
    number of turns from which it is."""

    step_s: _Time
    request_s: _Time
    first_token_s: _Time
    error: float
    max_running: _Count
    kv_cache_tokens: Annotated[int, Meta(ge=1)]
    by_concurrency: tuple[tuple[int, float, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Of each step: seconds of training per sampled token of the batch, and of publishing.
    ``ranks`` are those of the run."""

    token_s: _Times
    publish_s: _Times
    ranks: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Syncs:
    """Seconds of the slowest replica, of each sync. ``bytes_per_s``: bandwidth of fetches from
    other hosts; None without such fetches."""

    stage_s: _Times
    pull_s: _Times
    stall_s: _Times
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """``replica_hours``: hours of all replicas together; ``detect_s``: from the last sign of life
    until a loss was seen; ``restart_s``: from then until another replica served in its place, or
    else how long the first replicas took to start."""

    lost_replicas: int
    replica_hours: float
    detect_s: _Time
    restart_s: _Time


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``groups`` are sibling rollouts, or single ones where the run did not write all rollouts.
    ``shared``: the fields of the run that a simulated one must share."""

    source: str
    steps: int
    groups: Annotated[
        tuple[Annotated[tuple[RecordedTurns, ...], Meta(min_length=1)], ...], Meta(min_length=1)
    ]
    decoding: Decoding
    training: Training
    syncs: Syncs
    losses: Losses
    shared: dict[str, Any] = field(default_factory=dict)

    def difference(self, fields: Mapping[str, Any]) -> str:
        """The first of a run's fields that the profiled run had otherwise; empty if none."""
        others = _shared(fields)
        for name, own in self.shared.items():
            if name in others and own != others[name]:
                return f"{name} is {others[name]}: the profile is of a run with {own}"
        return ""


def read_profile(path: Path) -> Profile:
    """Raises ConfigError if it is missing or damaged, or a field is missing or out of its
    bounds."""
    fix = "write it with: torchtitan-rl profile RUN_DIR"
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"--profile is {path}: {error.strerror}; {fix}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"--profile is {path}: {one_line(error)}; {fix}") from error
    if errors := list(_errors(profile)):
        raise ConfigError([f"--profile is {path}: {error}; {fix}" for error in errors])
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    replace_file(path, msgspec.json.format(msgspec.json.encode(profile), indent=1))


def _errors(profile: Profile) -> Iterator[str]:
    if profile.decoding.step_s + profile.decoding.request_s < _LEAST_TOKEN_S:
        yield f"decoding.step_s and request_s must be at least {_LEAST_TOKEN_S:g} together"
    for one in (one for group in profile.groups for one in group):
        turns = len(one.sampled_tokens)
        if (len(one.prompt_tokens), len(one.environment_s)) != (turns, turns + 1):
            yield "groups has a rollout whose numbers of turns differ"
            return


def profile_run(run_dir: Path) -> Profile:
    """Make the profile of a run from its records. Raises ConfigError, which names each field that
    the records lack."""
    run = read_recorded(run_dir)
    rows = [row for step, row in sorted(run.rows.items()) if step > min(run.rows)]
    if not rows:
        raise ConfigError(f"RUN_DIR is {run_dir}: it has one step; a profile needs two")
    groups, turns = _rollouts(run)
    if not any(metrics.inter_token_latency_s for _, metrics in turns):
        raise ConfigError(
            f"RUN_DIR is {run_dir}: rollouts.jsonl has no timings of rollouts that were chosen at "
            "random; give a run with --metrics.rollouts-per-step all"
        )

    def values(name: str, *, per: str | None = None) -> tuple[float, ...]:
        found = []
        for row in rows:
            value, divisor = value_in(row, name), 1.0 if per is None else value_in(row, per)
            if value is not None and divisor:
                found.append(value / divisor)
        return tuple(found)

    missing = [
        name
        for name in ("time/train_s", "sync/publish_s", "sync/stage_s", "sync/pull_stall_ms_mean")
        if not values(name)
    ]
    if missing:
        raise ConfigError(
            f"RUN_DIR is {run_dir}: metrics.jsonl has no {', '.join(missing)}; give a run that "
            "trains and generates, and has taken two steps or more"
        )
    replicas = _number(run.identity, "generator.replicas")
    fetched = sum(values("sync/host_fetch_bytes")), sum(values("sync/host_fetch_s"))
    kv_tokens = max(values("engine/kv_cache_tokens", per="engine/replicas"), default=0.0)
    return Profile(
        source=str(run_dir),
        steps=len(rows),
        groups=groups,
        decoding=_decoding(
            turns,
            max_running=_number(run.identity, "generator.max_running_requests", 128),
            kv_cache_tokens=round(kv_tokens) or 1 << 20,
        ),
        training=Training(
            token_s=values("time/train_s", per="tokens/generated"),
            publish_s=values("sync/publish_s"),
            ranks=math.prod(_number(run.identity, f"trainer.{name}") for name in _TRAINER_RANKS),
        ),
        syncs=Syncs(
            stage_s=values("sync/stage_s"),
            pull_s=values("sync/pull_s"),
            stall_s=tuple(ms / 1e3 for ms in values("sync/pull_stall_ms_mean")),
            bytes_per_s=fetched[0] / fetched[1] if all(fetched) else None,
        ),
        losses=_losses(run, rows, replicas),
        shared=_shared(run.identity),
    )


def _shared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The task's class, without its module, which may be a file of another name, and the limits
    and sampling of rollouts."""
    task = {"task": str(fields["task"]).rpartition(".")[2]} if "task" in fields else {}
    return task | {name: fields[name] for name in fields if name.startswith(_OF_ROLLOUTS)}


def _number(identity: Mapping[str, Any], name: str, default: int = 1) -> int:
    value = identity.get(name)
    return value if isinstance(value, int) and value > 0 else default


def _rollouts(
    run: RecordedRun,
) -> tuple[tuple[tuple[RecordedTurns, ...], ...], list[tuple[int, CompletionMetrics]]]:
    """The groups, and of each turn its number of tokens and its timings."""
    first = min(run.rows)
    by_group: defaultdict[tuple[int, str], list[RecordedTurns]] = defaultdict(list)
    turns: list[tuple[int, CompletionMetrics]] = []
    path = run.run_dir / "rollouts.jsonl"
    is_whole = run.identity.get("metrics.rollouts_per_step") == "all"
    try:
        for row, rollout in read_rollouts(path):
            step = step_in(rollout.rollout_id, row)
            if row.get("split") != Split.TRAIN or step == first or not rollout.turns:
                continue
            if not is_whole and row.get("chosen") != "random":
                continue  # the best and the worst have other lengths
            group = rollout.group_id if is_whole else rollout.rollout_id
            by_group[step, group].append(_recorded(rollout))
            for turn in rollout.turns:
                metrics, count = turn.completion.metrics, len(turn.completion.token_ids)
                if metrics is not None and count:
                    turns.append((count, metrics))
    except (OSError, ValueError) as error:
        raise ConfigError(f"RUN_DIR is {run.run_dir}: {one_line(error)}") from error
    groups = [tuple(group) for group in by_group.values()]
    return tuple(groups[:: -(-len(groups) // _MAX_GROUPS) or 1]), turns


def _recorded(rollout: Rollout) -> RecordedTurns:
    calls = len(rollout.turns) + 1
    delay_s = rollout.phase_s.get("environment", 0.0) / calls
    delays = [delay_s] * calls
    delays[-1] += rollout.phase_s.get("reward", 0.0)
    return RecordedTurns(
        prompt_tokens=tuple(len(turn.prompt_token_ids) for turn in rollout.turns),
        sampled_tokens=tuple(len(turn.completion.token_ids) for turn in rollout.turns),
        environment_s=tuple(delays),
        reward=rollout.reward,
        cause=rollout.status.value if rollout.status.is_failure else "",
    )


def _decoding(
    turns: Sequence[tuple[int, CompletionMetrics]], *, max_running: int, kv_cache_tokens: int
) -> Decoding:
    counts = np.array([max(1, count - 1) for count, _ in turns], dtype=float)
    together = np.array([min(max(1, one.requests_in_flight), max_running) for _, one in turns])
    token_s = np.array([one.inter_token_latency_s for _, one in turns])
    has_time = token_s > 0  # a turn of one token has none
    step_s, request_s = _line(together[has_time], token_s[has_time], counts[has_time])
    fitted = step_s + request_s * together
    first_s = np.array([one.time_to_first_token_s for _, one in turns]) - fitted
    has_room = np.array([one.requests_in_flight <= max_running for _, one in turns])
    if not has_room.any():
        has_room[:] = True
    by_bucket = defaultdict(list)
    for number, seconds in zip(together[has_time], token_s[has_time], strict=True):
        by_bucket[1 << int(number - 1).bit_length()].append(float(seconds))
    weights = counts * has_time
    deviation = (np.abs(fitted - token_s) * weights).sum() / ((token_s * weights).sum() or 1.0)
    return Decoding(
        step_s=step_s,
        request_s=request_s,
        first_token_s=max(0.0, float(first_s[has_room].sum() / together[has_room].sum())),
        error=float(deviation),
        max_running=max_running,
        kv_cache_tokens=kv_cache_tokens,
        by_concurrency=tuple(
            (one, median(times), len(times)) for one, times in sorted(by_bucket.items())
        ),
    )


def _line(
    x: npt.NDArray[Any], y: npt.NDArray[Any], weights: npt.NDArray[Any]
) -> tuple[float, float]:
    """Fit ``y = a + b x``, with a and b at least 0, and return both."""
    if not len(x):
        return 0.0, 0.0
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    variance = (weights * (x - mean_x) ** 2).sum()
    slope = (weights * (x - mean_x) * (y - mean_y)).sum() / variance if variance else 0.0
    slope = float(np.clip(slope, 0.0, mean_y / mean_x))
    return float(mean_y - slope * mean_x), slope


def _losses(run: RecordedRun, rows: Sequence[Row], replicas: int) -> Losses:
    # The number may have changed during the run.
    seconds = sum(
        (value_in(row, "engine/replicas") or replicas) * (value_in(row, "time/step_s") or 0.0)
        for row in rows
    )
    try:
        found = [row for row in read_failures(run.run_dir) if row.get("part") == Part.REPLICA]
        starts_s = _starts_s(run.run_dir / "traces")
    except (OutputError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"RUN_DIR is {run.run_dir}: {one_line(error)}") from error
    silent = [row["silent_s"] for row in found if row.get("silent_s") is not None]
    served = [row["serve_s"] for row in found if row.get("serve_s") is not None]
    return Losses(
        lost_replicas=len(found),
        replica_hours=seconds / 3600,
        detect_s=fmean(silent or [0.0]),
        restart_s=fmean(served or starts_s or [0.0]),
    )


def _starts_s(folder: Path) -> list[float]:
    return [
        event["dur"] / 1e6
        for path in folder.glob("*replica*.jsonl")
        for line in whole_lines(path)
        if (event := parse_object(path.name, line)).get("name") == "start"
    ]
