"""Compares the seconds per step of synchronous and asynchronous training on the same two cores.

    python -m benchmarks.async_training [--steps 24] [--output-dir DIR] [--json FILE]

The *split* arms pin one replica to one core and the trainer to the other, at staleness 0, 1, 2, 4.
The ideal time of a step is the longer one of its two phases, generation and training, as the split
arm at staleness 0 measures them. The *both* arms pin nothing (two replicas, two trainer threads). A
user of two cores would run these, synchronously or at staleness 1. All arms run the same job from
the same seed, alternating, twice. Figures are medians over the steps of each run, without the first
two steps and the last ones, during which nothing is generated any more.

The time of an arm beyond the ideal is either *waiting* (both parts, trainer and replica, had
nothing to do) or *slower work* (the busier part was busy for longer than in the synchronous arm).
The CPU seconds of each process show the reason. The controller has no core of its own, and does not
run on the trainer's core. If the replica and the controller together need longer than the ideal
time, they are the limit of this split.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

from benchmarks.cpu_seconds import per_step
from benchmarks.options import at_least, keep_options
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
    return [
        Arm(name=f"{name} S={s}", options=(*options, "--schedule.staleness", str(s)))
        for name, options, of_arm in (("both", BOTH, STALENESS[:2]), ("split", SPLIT, STALENESS))
        for s in of_arm
    ]


def steady(runs: list[FinishedRun], name: str) -> list[float]:
    """The metric ``name`` of each measured step. The last steps are left out, because nothing is
    generated during the last S + 1 steps."""
    values = []
    for run in runs:
        column = run.column(name, first_step=FIRST_STEP)
        values += column[: len(column) - max(STALENESS) - 1]
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=at_least(1), default=2)
    parser.add_argument("--output-dir", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=Path("outputs/async_training.json"))
    given = parser.parse_args()
    folder = given.output_dir or Path(mkdtemp(prefix="async-training-"))
    keep_options(folder, {"steps": given.steps})
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
    report(runs, facts, settings, given.json)


def cpu_seconds(runs: list[FinishedRun]) -> dict[str, float]:
    """The CPU seconds of each process in one measured step: medians over the runs."""
    found = []
    for run in runs:
        steps = len(run.column("time/step_s"))
        found.append(per_step(run.cpu_after, FIRST_STEP, steps - max(STALENESS) - 1))
    names = sorted(set().union(*found))
    return {name: median(one[name] for one in found if name in one) for name in names}


def lost_seconds(runs: list[FinishedRun], *, ideal_s: float) -> dict[str, float]:
    """The seconds of a step beyond the ideal time, by cause (see the module)."""
    names = ("time/step_s", "overlap/trainer_idle_share", "overlap/generator_idle_share")
    steps = list(zip(*(steady(runs, name) for name in names), strict=True))
    waiting_s = median(step_s * min(idle) for step_s, *idle in steps)
    beyond_s = median(step_s for step_s, *_ in steps) - ideal_s
    return {"waiting_s": waiting_s, "slower_work_s": beyond_s - waiting_s}


def report(
    runs: dict[str, list[FinishedRun]],
    facts: dict[str, object],
    settings: dict[str, str],
    path: Path,
) -> None:
    split = runs["split S=0"]
    training = median(steady(split, "time/train_s")) + median(steady(split, "sync/publish_s"))
    generation = median(steady(split, "time/step_s")) - training
    ideal = max(generation, training)
    seconds = {name: median(steady(of_arm, "time/step_s")) for name, of_arm in runs.items()}
    best_sync = min(seconds["both S=0"], seconds["split S=0"])
    lost = {
        name: lost_seconds(of_arm, ideal_s=ideal)
        for name, of_arm in runs.items()
        if name.startswith("split")
    }
    print(f"\nsplit: generation {generation:.2f} s, training {training:.2f} s, ideal {ideal:.2f} s")
    rows = []
    for name, value in seconds.items():
        of_ideal = [""] * 3
        if name in lost:
            of_ideal = [f"{ideal / value:.0%}", *(f"{part:.2f}" for part in lost[name].values())]
        age = median(steady(runs[name], "policy/staleness_mean"))
        rows.append([name, f"{value:.2f}", *of_ideal, f"{best_sync / value:.2f}x", f"{age:.1f}"])
    header = ["arm", "s/step", "of ideal", "waiting s", "slower work s"]
    print_table([*header, "best sync / arm", "mean age"], rows)
    cpu = {name: cpu_seconds(of_arm) for name, of_arm in runs.items()}
    for name, of_arm in cpu.items():
        spent = ", ".join(f"{process} {value:.2f}" for process, value in of_arm.items())
        print(f"{name}: CPU seconds a step: {spent or 'not measured'}")
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
            "share_of_ideal": {name: ideal / seconds[name] for name in lost},
            "lost": lost,
            "cpu_s_per_step": cpu,
            "best_synchronous_over_arm": {
                name: best_sync / value for name, value in seconds.items()
            },
            "repeats": {
                name: [run.column("time/step_s") for run in of_arm] for name, of_arm in runs.items()
            },
        },
    )


if __name__ == "__main__":
    main()
