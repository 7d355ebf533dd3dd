"""Seconds per optimizer step and generated tokens per second of the whole system, as a JSON line.

    python -m benchmarks.end_to_end [--model DIR] [--groups 16] [--group-size 8]
        [--max-tokens 36] [--max-length 256] [--steps 12] [--repeats 3]

Runs `torchtitan-rl train` and reads its metrics from the second step on, because caches fill in the
first step. A step is everything between the ends of two optimizer steps: rollouts with their
environments and rewards, training, and the transfer of the new weights. Only the JSON line is
printed to stdout, so that it can be compared with the results of other frameworks on the same
machine. Use ``--config`` and ``--options`` (further options of `torchtitan-rl train`) to match
their settings.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benchmarks.options import at_least, keep_options
from benchmarks.plots import bars
from benchmarks.report import heading, write_report
from benchmarks.training_runs import ROOT, FinishedRun, train

FIRST_STEP = 2
# Options that change what is measured.
OF_RUNS = (
    "config",
    "model",
    "groups",
    "group_size",
    "max_tokens",
    "max_length",
    "steps",
    "options",
)
_TOKENS = "tokens/generated"
_COLUMNS = ("time/step_s", "time/rollout_s", "time/train_s", "time/sync_s", _TOKENS)


def main() -> None:
    options = _options()
    report = heading(options)
    root = options.output_dir or Path(mkdtemp(prefix="end_to_end-"))
    words = train_words(options)
    keep_options(root, {name: vars(options)[name] for name in OF_RUNS})
    runs = [
        train(options.config, words, run_dir=root / f"run{repeat}")
        for repeat in range(options.repeats)
    ]
    settings = {
        "model": str(options.model or options.config.stem),
        "groups": options.groups,
        "group_size": options.group_size,
        "max_tokens_per_turn": options.max_tokens,
        "max_length": options.max_length,
        "options": options.options,
    }
    repeats = [{name: column(run, name) for name in _COLUMNS} for run in runs]
    line = settings | figures(repeats)
    print(json.dumps(line))
    bars(
        options.output.with_suffix(".png"),
        {"step": line["step_s"], "rollouts": line["rollout_s"], "training": line["train_s"]},
        title=f"{settings['model']}: {options.groups} groups of {options.group_size}, "
        f"{line['generated_tokens_per_s']:,.0f} tokens/s",
        label="seconds a step, median",
    )
    report |= {"line": line, "repeats": repeats, "run_s": [run.seconds for run in runs]}
    write_report(options.output, report)


def train_words(options: argparse.Namespace) -> list[str]:
    """The options of `torchtitan-rl train` other than the configuration. If an option is given
    twice, the last value counts."""
    length = str(options.max_length)
    words = [
        *("--num-steps", str(options.steps)),
        *("--rollout.groups-per-step", str(options.groups)),
        *("--rollout.group-size", str(options.group_size)),
        *("--rollout.sampling.max-tokens-per-turn", str(options.max_tokens)),
        *("--rollout.max-total-tokens", length),
        *("--generator.max-model-len", length),
        *("--trainer.max-episode-tokens", length),
        *("--trainer.max-tokens-per-microbatch", str(32 * options.max_length)),
        *("--trainer.optimizer.decay-steps", "0"),
        *("--evaluation.num-problems", "0"),
        *("--checkpoint.every", "0"),
        "--checkpoint.no-export-hf",
    ]
    if options.model is not None:
        words += ["--policy.checkpoint", options.model]
    return words + shlex.split(options.options)


def column(run: FinishedRun, name: str) -> list[float]:
    values = run.column(name, first_step=FIRST_STEP)
    if not values:
        raise SystemExit(f"the run has no {name} from step {FIRST_STEP} on: give it more --steps")
    return values


def figures(repeats: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Medians over the steps of all repeats. Tokens per second are computed over the whole time of
    these steps."""
    seconds, tokens = _all(repeats, "time/step_s"), _all(repeats, _TOKENS)
    return {
        "steps": len(seconds),
        "step_s": statistics.median(seconds),
        "step_s_mean": statistics.mean(seconds),
        "rollout_s": statistics.median(_all(repeats, "time/rollout_s")),
        "train_s": statistics.median(_all(repeats, "time/train_s")),
        "sync_s": statistics.median(_all(repeats, "time/sync_s")),
        "generated_tokens": sum(tokens),
        "generated_tokens_per_s": sum(tokens) / sum(seconds),
    }


def _all(repeats: Sequence[dict[str, list[float]]], name: str) -> list[float]:
    return [value for repeat in repeats for value in repeat[name]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "alphabet_sort_tiny.py")
    parser.add_argument("--model", help="in Hugging Face format, as policy.checkpoint takes it")
    parser.add_argument("--groups", type=int, default=16, help="of an optimizer step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=36, help="of one turn")
    parser.add_argument("--max-length", type=int, default=256, help="tokens of a whole rollout")
    parser.add_argument("--steps", type=at_least(FIRST_STEP), default=12)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--options", default="", help="more options of `torchtitan-rl train`")
    parser.add_argument("--output-dir", type=Path, help="of the runs")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/end_to_end.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
