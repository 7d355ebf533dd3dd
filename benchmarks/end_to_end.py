"""Seconds per optimizer step and generated tokens per second of the whole system, as a JSON line.

    python -m benchmarks.end_to_end [--model DIR] [--groups 16] [--group-size 8] [--max-tokens 36]

Runs `torchtitan-rl train` on the alphabet-sort task and reads its metrics, from the second step on:
the first one waits for caches to fill. ``--options`` are further ones of `torchtitan-rl train`
(such as ``--schedule.staleness 1``), so that other frameworks' settings can be matched.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.plots import bars
from benchmarks.report import machine, write_report
from benchmarks.training_runs import ROOT, FinishedRun, train


def main() -> None:
    options = _options()
    root = options.output_dir or Path(mkdtemp(prefix="end_to_end-"))
    words = [
        *("--num-steps", str(options.steps)),
        *("--rollout.groups-per-step", str(options.groups)),
        *("--rollout.group-size", str(options.group_size)),
        *("--rollout.sampling.max-tokens-per-turn", str(options.max_tokens)),
        *("--validation.num-problems", "0"),
        *("--checkpoint.every", "0"),
        "--checkpoint.no-export-hf",
        *shlex.split(options.options),
    ]
    if options.model is not None:
        words += ["--policy.checkpoint", str(options.model)]
    runs = [
        train(options.config, words, run_dir=root / f"run{repeat}")
        for repeat in range(options.repeats)
    ]
    line = {
        "model": str(options.model or options.config.stem),
        "groups": options.groups,
        "group_size": options.group_size,
        "max_tokens_per_turn": options.max_tokens,
        "options": options.options,
        "steps": sum(len(_column(run, "time/step_s")) for run in runs),
        "step_s": _median(runs, "time/step_s"),
        "rollout_s": _median(runs, "time/rollout_s"),
        "train_s": _median(runs, "time/train_s"),
        "generated_tokens_per_s": _median(runs, "tokens/generated_per_second"),
        "run_s": [run.seconds for run in runs],
    }
    print(json.dumps(line))
    names = ("step_s", "rollout_s", "train_s")
    bars(
        options.output.with_suffix(".png"),
        {name: line[name] for name in names},
        title=f"{line['model']}: {options.groups} groups of {options.group_size}",
        label="seconds",
    )
    every_step = [{name: _column(run, f"time/{name}") for name in names} for run in runs]
    write_report(options.output, {"machine": machine(), **line, "every_step": every_step})


def _column(run: FinishedRun, name: str) -> list[float]:
    return run.column(name, first_step=2)


def _median(runs: list[FinishedRun], name: str) -> float:
    return statistics.median(value for run in runs for value in _column(run, name))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "alphabet_sort_tiny.py")
    parser.add_argument("--model", type=Path, help="a directory in Hugging Face format")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=36, help="of one turn")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--options", default="", help="more options of `torchtitan-rl train`")
    parser.add_argument("--output-dir", type=Path, help="of the runs")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/end_to_end.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
