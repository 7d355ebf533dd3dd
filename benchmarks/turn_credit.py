"""Compares credit by turn with credit by outcome: validation reward after the same steps.

    python -m benchmarks.turn_credit [--seeds 0 1 2] [--steps 40] [--output-dir DIR]

Alphabet sort with four turns, each of which has a reward; the rollout's reward is their mean. Both
sides have the same policy, problems, seeds and steps (staleness 0). The two credits differ in the
scale of their advantages. Adam does not depend on this scale if gradients are not clipped, so
gradients are not clipped here. Runs that exist in the output directory are not repeated. Writes
``turn_credit.json`` into ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from benchmarks.report import heading, print_table, write_report
from benchmarks.training_runs import ROOT, FinishedRun, train

CONFIG = ROOT / "configs" / "alphabet_sort_tiny.py"
SIDES = {
    "outcome": ["--rollout.credit", "outcome"],
    "turn": ["--rollout.credit", "turn", "--rollout.final-reward-weight", "0"],
}
_SAME = {
    "task.min-turns": 4,
    "task.max-turns": 4,
    "rollout.max-turns": 4,
    "rollout.max-total-tokens": 320,
    "rollout.sampling.max-tokens-per-turn": 48,
    "generator.replicas": 1,
    "generator.max-model-len": 320,
    "trainer.max-episode-tokens": 320,
    "trainer.max-tokens-per-microbatch": 32 * 320,
    "trainer.optimizer.decay-steps": 0,
    "trainer.optimizer.max-grad-norm": 1000,
    "evaluation.every": 10,
    "checkpoint.every": 0,
}


def curve(run: FinishedRun) -> dict[int, float]:
    """Return the validation reward by step."""
    rows = [row for row in run.rows if "evaluation/reward_mean" in row]
    return {row["step"]: row["evaluation/reward_mean"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/turn_credit"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    report = heading(given)
    curves: dict[str, dict[int, dict[int, float]]] = {side: {} for side in SIDES}
    for seed in given.seeds:
        for side, words in SIDES.items():
            values = _SAME | {"seed": seed, "num-steps": given.steps}
            options = [word for name, value in values.items() for word in (f"--{name}", str(value))]
            folder = given.output_dir / f"{side}-seed{seed}"
            curves[side][seed] = curve(train(CONFIG, [*options, *words], run_dir=folder))
    medians = {
        side: {
            step: median(points[step] for points in of_side.values())
            for step in of_side[given.seeds[0]]
        }
        for side, of_side in curves.items()
    }
    print_table(
        ["validation reward after step", *map(str, medians["outcome"])],
        [[side, *(f"{value:.3f}" for value in medians[side].values())] for side in SIDES],
    )
    write_report(
        given.results / "turn_credit.json",
        report | {"columns": "validation reward by step", "medians": medians, "curves": curves},
    )


if __name__ == "__main__":
    main()
