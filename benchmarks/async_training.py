"""Seconds per optimizer step, synchronous against asynchronous, on the same two cores.

    python -m benchmarks.async_training [--steps 24] [--output-dir DIR] [--json FILE]

The *split* arms pin one replica to one core and the trainer to the other, at staleness 0, 1, 2, 4.
Their ideal is the longer of the two phases, as the split arm at staleness 0 measures them: nothing
can be faster on this split. The *both* arm is synchronous too, but gives both cores to each phase
(two replicas, two trainer threads): what a user of two cores would otherwise run. All arms run the
same job from the same seed, one after another, twice, in turns; figures are medians over all steps
but the first two of each run, and the last ones, beside which nothing is generated any more.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

from benchmarks.plots import bars
from benchmarks.report import machine, print_table, write_report
from benchmarks.training_runs import ROOT, FinishedRun, train

CONFIG = ROOT / "configs" / "alphabet_sort_tiny.py"
SPLIT = ("--generator.replicas", "1", "--trainer.threads", "1", "--pin-cores")
BOTH = ("--generator.replicas", "2", "--trainer.threads", "2")
STALENESS = (0, 1, 2, 4)
FIRST_STEP = 3


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    options: tuple[str, ...]


def arms() -> list[Arm]:
    both = Arm(name="both S=0", options=(*BOTH, "--schedule.staleness", "0"))
    split = [
        Arm(name=f"split S={s}", options=(*SPLIT, "--schedule.staleness", str(s)))
        for s in STALENESS
    ]
    return [both, *split]


def step_seconds(runs: list[FinishedRun], steps: int) -> list[float]:
    """Of each step. The last S + 1 have no generation beside them any more, and are left out."""
    seconds = []
    for run in runs:
        column = run.column("time/step_s", first_step=FIRST_STEP)
        seconds += column[: len(column) - max(STALENESS) - 1]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=Path("outputs/async_training.json"))
    given = parser.parse_args()
    folder = given.output_dir or Path(mkdtemp(prefix="async-training-"))
    fixed = (
        "--num-steps", str(given.steps),
        "--evaluation.num-problems", "0",
        "--checkpoint.every", "0",
        "--trainer.optimizer.decay-steps", "0",
    )  # fmt: skip
    facts = machine()
    runs: dict[str, list[FinishedRun]] = {arm.name: [] for arm in arms()}
    for repeat in range(given.repeats):
        for arm in arms():
            name = f"{arm.name.replace(' ', '-')}-{repeat}"
            run = train(CONFIG, [*fixed, *arm.options], run_dir=folder / name)
            runs[arm.name].append(run)
            print(f"{name}: {median(run.column('time/step_s', first_step=FIRST_STEP)):.2f} s/step")
    settings = {name: str(value) for name, value in vars(given).items()}
    report(runs, given.steps, facts, settings, given.json)


def report(
    runs: dict[str, list[FinishedRun]],
    steps: int,
    facts: dict[str, object],
    settings: dict[str, str],
    path: Path,
) -> None:
    split = runs["split S=0"]

    def phase(name: str) -> float:
        return median(v for run in split for v in run.column(name, first_step=FIRST_STEP))

    training = phase("time/train_s") + phase("sync/publish_s")
    generation = median(step_seconds(split, steps)) - training
    ideal = max(generation, training)
    seconds = {name: median(step_seconds(of_arm, steps)) for name, of_arm in runs.items()}
    best_sync = min(seconds["both S=0"], seconds["split S=0"])
    print(f"\nsplit: generation {generation:.2f} s, training {training:.2f} s, ideal {ideal:.2f} s")
    rows = [
        [
            name,
            f"{value:.2f}",
            f"{ideal / value:.0%}" if name.startswith("split") else "",
            f"{best_sync / value:.2f}x",
            f"{median(staleness(runs[name])):.1f}",
        ]
        for name, value in seconds.items()
    ]
    print_table(["arm", "s/step", "of ideal", "best sync / arm", "mean age"], rows)
    bars(path.with_suffix(".png"), seconds, title="Optimizer step", label="seconds, median")
    write_report(
        path,
        {
            "machine": facts,
            "options": settings,
            "generation_s": generation,
            "training_s": training,
            "ideal_s": ideal,
            "seconds_per_step": seconds,
            "share_of_ideal": {
                name: ideal / value for name, value in seconds.items() if name.startswith("split")
            },
            "best_synchronous_over_arm": {
                name: best_sync / value for name, value in seconds.items()
            },
            "repeats": {
                name: [run.column("time/step_s") for run in of_arm] for name, of_arm in runs.items()
            },
        },
    )


def staleness(runs: list[FinishedRun]) -> list[float]:
    return [v for run in runs for v in run.column("policy/staleness_mean", first_step=FIRST_STEP)]


if __name__ == "__main__":
    main()
