"""Validation reward over steps and over seconds, for several stalenesses and seeds.

    python -m benchmarks.learning_curves [--staleness 0 2] [--seeds 0 1 2] [--output-dir DIR]

Runs that exist in the output directory are not repeated. Writes ``async_learning.json`` and
``async_learning.png`` into ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

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
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
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
    rows = []
    for (staleness, seed), run in sorted(runs.items()):
        points = curve(run)
        rows.append(
            [
                f"S={staleness} seed {seed}",
                f"{points[0][2]:.3f}",
                f"{points[-1][2]:.3f}",
                f"{run.seconds:.0f}",
                f"{max(run.column('policy/staleness_max')):.0f}",
            ]
        )
    print_table(["run", "reward at start", "at end", "seconds in all", "oldest token"], rows)
    curves = {f"S={s} seed {seed}": curve(run) for (s, seed), run in sorted(runs.items())}
    write_report(
        given.results / "async_learning.json",
        report
        | {
            "columns": ["step", "seconds", "validation reward"],
            "curves": curves,
            "seconds_in_all": {
                f"S={s} seed {seed}": run.seconds for (s, seed), run in runs.items()
            },
        },
    )
    draw(runs, given.results / "async_learning.png")


def draw(runs: dict[tuple[int, int], FinishedRun], path: Path) -> None:
    colours = {s: f"C{i}" for i, s in enumerate(sorted({s for s, _ in runs}))}
    with figure(path, size=(10, 4), columns=2, shares_y=True) as (over_steps, over_seconds):
        for (staleness, seed), run in sorted(runs.items()):
            steps, seconds, rewards = zip(*curve(run), strict=True)
            label = f"S = {staleness}" if seed == min(s for _, s in runs) else None
            over_steps.plot(steps, rewards, color=colours[staleness], alpha=0.7, label=label)
            over_seconds.plot(seconds, rewards, color=colours[staleness], alpha=0.7)
        over_steps.set(xlabel="optimizer steps", ylabel="validation reward")
        over_seconds.set(xlabel="seconds after the first evaluation")
        over_steps.legend()
    print(f"drawn to {path}")


if __name__ == "__main__":
    main()
