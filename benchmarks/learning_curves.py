"""Validation reward over steps, for several stalenesses and seeds.

    python -m benchmarks.learning_curves [--staleness 0 1 2 4] [--seeds 0 1 2] [--output-dir DIR]

Runs that exist in the output directory are not repeated. Writes ``async_learning.json`` and
``async_learning.png`` into ``benchmarks/results``. Curves of other stalenesses and seeds stay in
the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.plots import figure
from benchmarks.report import heading, print_table, write_report
from benchmarks.training_runs import ROOT, FinishedRun, train

CONFIG = ROOT / "configs" / "alphabet_sort_tiny.py"


def curve(run: FinishedRun) -> list[tuple[int, float, float]]:
    """Return (step, seconds since the first evaluation ended, reward) for each evaluation."""
    rows = [row for row in run.rows if "evaluation/reward_mean" in row]
    start = rows[0]["wall_time_s"]
    return [(r["step"], r["wall_time_s"] - start, r["evaluation/reward_mean"]) for r in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/learning_curves"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    report = heading(given)
    runs: dict[tuple[int, int], FinishedRun] = {}
    for seed in given.seeds:
        for staleness in given.staleness:
            options = ["--seed", str(seed), "--schedule.staleness", str(staleness)]
            folder = given.output_dir / f"s{staleness}-seed{seed}"
            runs[staleness, seed] = train(CONFIG, options, run_dir=folder)
    path = given.results / "async_learning.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    names = {f"S={s} seed {seed}": run for (s, seed), run in runs.items()}
    report |= {
        "columns": ["step", "seconds", "validation reward"],
        "curves": known.get("curves", {}) | {name: curve(run) for name, run in names.items()},
        "seconds_in_all": known.get("seconds_in_all", {})
        | {name: run.seconds for name, run in names.items()},
        "mean_age": known.get("mean_age", {})
        | {name: mean(run.column("policy/staleness_mean")) for name, run in names.items()},
    }
    rows = [
        [
            name,
            f"{points[0][2]:.3f}",
            f"{points[-1][2]:.3f}",
            str(report["mean_age"].get(name, ""))[:4],
        ]
        for name, points in sorted(report["curves"].items())
    ]
    print_table(["run", "reward at start", "at end", "mean age of tokens"], rows)
    write_report(path, report)
    draw(report["curves"], path.with_suffix(".png"))


def draw(curves: dict[str, Any], path: Path) -> None:
    """Draw each run, and the mean over the seeds of a staleness."""
    stalenesses = sorted({int(name.split()[0].removeprefix("S=")) for name in curves})
    with figure(path, size=(7, 4)) as axes:
        for number, staleness in enumerate(stalenesses):
            runs = [points for name, points in curves.items() if f"S={staleness} " in name]
            for points in runs:
                steps, _, rewards = zip(*points, strict=True)
                axes.plot(steps, rewards, color=f"C{number}", alpha=0.3, linewidth=1)
            means = [mean(one[2] for one in step) for step in zip(*runs, strict=True)]
            axes.plot(steps, means, color=f"C{number}", label=f"S = {staleness}, mean")
        axes.set(xlabel="optimizer steps", ylabel="validation reward")
        axes.legend()
    print(f"drawn to {path}")


if __name__ == "__main__":
    main()
