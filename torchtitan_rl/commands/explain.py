"""``torchtitan-rl explain RUN_DIR``: says what a run spent its time on, whether it learns, and what
to try first.

Exit codes: 0 nothing wrong was found; 1 something was found; 2 there is no run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_rl.config.run import IDENTITY_FILE
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.files import parse_object
from torchtitan_rl.observability.explain import RunFacts, diagnose, summarize
from torchtitan_rl.observability.sinks import Row, RowKind, read_rows

_USAGE = "usage: torchtitan-rl explain RUN_DIR"
_LAST_STEPS = 50  # whose turns show the speed of the replicas


def main(words: Sequence[str]) -> int:
    """``torchtitan-rl explain WORDS``; returns the exit code.

    Raises:
        ConfigError: there is no run, or it cannot be read.
    """
    if list(words) in (["-h"], ["--help"]):
        print(f"{_USAGE}\n\n{(__doc__ or '').partition(': ')[2]}")
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(f"RUN_DIR: give the folder of one run; {_USAGE}")
    facts = read_facts(Path(words[0]))
    for line in summarize(facts):
        print(line)
    found = diagnose(facts)
    for diagnosis in found:
        print(f"found: {diagnosis}")
    if not found:
        print("nothing wrong was found")
    return int(bool(found))


def read_facts(run_dir: Path) -> RunFacts:
    """Read the files of a run.

    Raises:
        ConfigError: there is no run, or a file cannot be read.
    """
    by_kind: defaultdict[str, dict[int, Row]] = defaultdict(dict)
    try:
        if not (run_dir / "metrics.jsonl").exists():
            raise ConfigError(f"{run_dir}: no run (no metrics.jsonl)")
        for line in read_rows(run_dir / "metrics.jsonl"):
            by_kind[str(line.row.get("kind"))][line.row["step"]] = line.row
        steps = [row for _, row in sorted(by_kind[RowKind.STEP].items())]
        last = steps[-1]["step"] if steps else 0
        token_s = _token_s(run_dir / "rollouts.jsonl", last - _LAST_STEPS)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_dir}: {error}") from error
    return RunFacts(
        steps=steps,
        evaluations=[row for _, row in sorted(by_kind[RowKind.EVALUATION].items())],
        fields=_fields(run_dir),
        token_s=token_s,
    )


def _fields(run_dir: Path) -> Mapping[str, Any]:
    try:
        return parse_object(IDENTITY_FILE, (run_dir / IDENTITY_FILE).read_bytes())
    except (OSError, ValueError):
        return {}


def _token_s(path: Path, after_step: int) -> dict[str, list[float]]:
    """The seconds per token of each logged turn after ``after_step``, by replica."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    if not path.exists():
        return {}
    for line in read_rows(path):
        if line.row["step"] <= after_step or line.row.get("split") != "train":
            continue
        for turn in line.row.get("turns", ()):
            metrics = turn.get("metrics") or {}
            seconds = metrics.get("inter_token_latency_s")
            if isinstance(seconds, int | float) and seconds > 0:
                found[str(turn.get("replica"))].append(seconds)
    return dict(found)
