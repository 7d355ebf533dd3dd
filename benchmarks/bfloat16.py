"""What the engines' rounding in bfloat16 does to learning, and what the importance weight changes.

    python -m benchmarks.bfloat16 [--seeds 0 1 2] [--steps 20] [--output-dir DIR]

The sides train `alphabet_sort_tiny` at staleness 0, on a CPU:

- ``float32``: engines and trainer in float32, as every run on a CPU;
- ``bfloat16, clip``: both in bfloat16, as on CUDA; ``trainer.loss.importance_weight none``;
- ``bfloat16, near clip``: the same with 0.22 times the distances of the clip from 1. Rounding
  changes the logprobs of this policy by 0.011, and those of 135M parameters by 0.05; so the clip is
  as near to the rounding here as the usual one is to that of 135M parameters;
- ``bfloat16, weighted``: what ``importance_weight auto`` decides on CUDA. At staleness 0 it has no
  clip.

Where the clip drops no token, ``clip`` and ``weighted`` have the same gradient. Columns of all
steps: the mean and the largest difference of logprobs at age 0, the share of tokens that the clip
dropped, or whose weight was capped, and Kish's effective share. Runs that exist in the output
directory are not repeated. Writes ``bfloat16.json`` into ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from benchmarks.report import heading, print_table, write_report
from benchmarks.training_runs import ROOT, FinishedRun, train
from benchmarks.turn_credit import CONFIG, curve

SIDES = {
    "float32": {"importance-weight": "none"},
    "bfloat16, clip": {"importance-weight": "none"},
    "bfloat16, near clip": {
        "importance-weight": "none",
        "clip-low": "0.044",
        "clip-high": "0.062",
    },
    "bfloat16, weighted": {"proximal-policy": "recomputed", "importance-weight": "token"},
}
COLUMNS = {
    "age_0/logprob_diff_mean": mean,
    "age_0/logprob_diff_max": max,
    "clip_share": mean,
    "weight_capped_share": mean,
    "effective_share": mean,
}


def summary(run: FinishedRun) -> dict[str, float]:
    found = {name: run.column(f"trainer/{name}") for name in COLUMNS}
    return {name: COLUMNS[name](values) for name, values in found.items() if values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/bfloat16"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    report = heading(given)
    runs: dict[str, list[FinishedRun]] = {side: [] for side in SIDES}
    for seed in given.seeds:
        for side, loss in SIDES.items():
            values = {f"trainer.loss.{name}": value for name, value in loss.items()}
            values |= {"seed": str(seed), "num-steps": str(given.steps), "checkpoint.every": "0"}
            values |= {"evaluation.every": "10"}
            options = [word for name, value in values.items() for word in (f"--{name}", value)]
            is_rounded = side.startswith("bfloat16")
            module = "benchmarks.bfloat16_processes" if is_rounded else "torchtitan_rl.commands.cli"
            folder = given.output_dir / f"{side.replace(', ', '-').replace(' ', '-')}-seed{seed}"
            runs[side].append(train(CONFIG, options, run_dir=folder, module=module))
    curves = {side: [curve(run) for run in of_side] for side, of_side in runs.items()}
    summaries = {side: [summary(run) for run in of_side] for side, of_side in runs.items()}
    print_table(
        ["mean over the seeds", *map(str, curves["float32"][0]), *COLUMNS],
        [
            [
                side,
                *(f"{mean(one[step] for one in curves[side]):.3f}" for step in curves[side][0]),
                *(f"{mean(one.get(name, 0.0) for one in summaries[side]):.2g}" for name in COLUMNS),
            ]
            for side in SIDES
        ],
    )
    write_report(
        given.results / "bfloat16.json",
        report | {"columns": "validation reward by step", "curves": curves, "metrics": summaries},
    )


if __name__ == "__main__":
    main()
