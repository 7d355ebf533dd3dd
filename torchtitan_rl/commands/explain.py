"""``torchtitan-rl explain RUN_DIR``: says what a run spent its time on, whether it learns, and what
to try first.

Exit codes: 0 nothing wrong was found; 1 something was found; 2 there is no run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchtitan_rl.bounds import is_line
from torchtitan_rl.config.resume import read_run_identity
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.lease import lock_errors
from torchtitan_rl.observability.explain import (
    MIN_STEPS,
    RunFacts,
    diagnose,
    finite,
    median_by_step,
    summarize,
)
from torchtitan_rl.observability.failures import read_failures, summarize_failures
from torchtitan_rl.observability.rollouts import read_rollouts
from torchtitan_rl.observability.sinks import Row, RowKind, Split, read_rows, step_in

_USAGE = "usage: torchtitan-rl explain RUN_DIR"
_LAST_STEPS = 50  # whose turns show the speed of the replicas


def main(words: Sequence[str]) -> int:
    if list(words) in (["-h"], ["--help"]):
        print(f"{_USAGE}\n\n{(__doc__ or '').partition(': ')[2]}")
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(f"RUN_DIR: give the folder of one run; {_USAGE}")
    run_dir = Path(words[0])
    facts = read_facts(run_dir)
    for line in [*_state(run_dir, facts), *summarize(facts), *summarize_failures(facts.failures)]:
        print(line)
    found = diagnose(facts)
    for diagnosis in found:
        print(f"found: {diagnosis}")
    if len(facts.steps) < MIN_STEPS:
        print(f"faults are looked for from step {MIN_STEPS} on")
    elif not found:
        print("nothing wrong was found")
    return int(bool(found))


def read_facts(run_dir: Path) -> RunFacts:
    """Raises ConfigError if there is no run, or a file cannot be read."""
    by_kind: defaultdict[str, dict[int, Row]] = defaultdict(dict)
    try:
        if not (run_dir / "metrics.jsonl").exists():
            raise ConfigError(f"{run_dir}: no run (no metrics.jsonl)")
        for line in read_rows(run_dir / "metrics.jsonl"):
            by_kind[str(line.row.get("kind"))][step_in(line.where, line.row)] = line.row
        steps = [row for _, row in sorted(by_kind[RowKind.STEP].items())]
        last = steps[-1]["step"] if steps else 0
        token_s = _token_s(run_dir / "rollouts.jsonl", last - _LAST_STEPS)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_dir}: {error}") from error
    return RunFacts(
        steps=steps,
        evaluations=[row for _, row in sorted(by_kind[RowKind.EVALUATION].items())],
        fields=read_run_identity(run_dir) or {},
        token_s=token_s,
        failures=read_failures(run_dir),
    )


def _state(run_dir: Path, facts: RunFacts) -> Iterator[str]:
    last, number = facts.steps[-1]["step"] if facts.steps else 0, facts.fields.get("num_steps")
    if isinstance(number, int) and last < number and not lock_errors(run_dir):
        yield (
            f"not running on this machine: ended after step {last} of {number}; "
            "--checkpoint.resume continues it"
        )


def _token_s(path: Path, after_step: int) -> dict[str, dict[int, float]]:
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    if not path.exists():
        return {}
    for row, rollout in read_rollouts(path):
        step = step_in(rollout.rollout_id, row)
        if step <= after_step or row.get("split") != Split.TRAIN:
            continue
        for turn in rollout.turns:
            metrics, name = turn.completion.metrics, turn.completion.replica
            seconds = None if metrics is None else finite(metrics.inter_token_latency_s)
            if seconds and seconds > 0 and isinstance(name, str) and is_line(name):
                found[name].append((step, seconds))
    return {name: median_by_step(times) for name, times in found.items()}
