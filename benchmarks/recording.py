"""What recording costs: all rollouts of each step, and what the trainer tells of each token.

    python -m benchmarks.recording [--steps 24] [--repeats 12]

- run: in one run of ``alphabet_sort_tiny``, every second step writes all of its rollouts, the
  others three. Compared are the seconds from step to step, and the seconds in which the
  controller's event loop writes the rows, as a share of the step.
- trainer: training steps on 64 episodes, of which every second one neither collects the values of
  its tokens nor computes the digest of its weights.

A ratio is the median with recording to the median without. Writes ``recording.json`` into
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.options import at_least
from benchmarks.report import heading, write_report
from benchmarks.training_work import WORKLOADS
from torchtitan_rl.commands import cli
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.observability.rollouts import RolloutLog
from torchtitan_rl.observability.sinks import Split, read_rows
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.training.packing import pack_episodes

_FIRST = 3  # steps before are warm-up
_ROW_LEN = 512


def run_part(steps: int, folder: Path) -> dict[str, Any]:
    """Measure one run whose steps alternate."""
    written_s: dict[int, float] = {}
    record = RolloutLog.record

    def alternating(log: RolloutLog, step: int, *rest: Any) -> dict[str, float]:
        log._per_step = "all" if step % 2 else 3
        started = time.perf_counter()
        try:
            return record(log, step, *rest)
        finally:
            if Split.TRAIN in rest:
                written_s[step] = time.perf_counter() - started

    words = ["train", "alphabet_sort_tiny", "--num-steps", str(steps), "--name", "recording"]
    words += ["--output-dir", str(folder), "--evaluation.num-problems", "0", "--checkpoint.every"]
    with mock.patch.object(RolloutLog, "record", alternating):
        if code := cli.main([*words, "0", "--metrics.progress", "plain"]):
            raise SystemExit(code)
    step_s: dict[str, list[float]] = defaultdict(list)
    row_s: dict[str, list[float]] = defaultdict(list)
    num_bytes: dict[int, int] = defaultdict(int)
    for line in read_rows(folder / "recording" / "rollouts.jsonl"):
        num_bytes[line.row["step"]] += len(line.data)
    for line in read_rows(folder / "recording" / "metrics.jsonl"):
        step = line.row["step"]
        if line.row["kind"] == "step" and step >= _FIRST:
            side = "all" if (step - 1) % 2 else "three"  # rows of a step are written after it
            step_s[side].append(line.row["time/step_s"])
            row_s["all" if step % 2 else "three"].append(written_s[step])
    share = (median(row_s["all"]) - median(row_s["three"])) / median(step_s["three"])
    return {
        "step_s": step_s,
        "row_s": row_s,
        "ratio": median(step_s["all"]) / median(step_s["three"]),
        "writing_share": share,
        "bytes_per_step": median(size for step, size in num_bytes.items() if step % 2),
    }


def trainer_part(repeats: int) -> dict[str, Any]:
    """Measure training steps that alternate."""
    from torchtitan_rl.backends.titan import trainer as module  # seconds

    (name, make), *_ = WORKLOADS.items()
    batch = pack_episodes(
        make(np.random.default_rng(0), 288), row_len=_ROW_LEN, temperature=1.0
    ).batch
    assert batch is not None
    config = TrainerConfig(
        max_episode_tokens=_ROW_LEN, max_tokens_per_microbatch=16 * _ROW_LEN, threads=1
    )
    policy = module.PolicyTrainer(POLICY_DIR, config, seed=0, max_steps=1000)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for repeat in range(2 + repeats):
        for side in seconds:
            with _without_terms(module) if side == "without" else nullcontext():
                started = time.perf_counter()
                policy.train_step(batch)
                if repeat >= 2:
                    seconds[side].append(time.perf_counter() - started)
    policy.close()
    ratio = median(a / b for a, b in zip(seconds["with"], seconds["without"], strict=True))
    return {"workload": name, "seconds": seconds, "ratio": ratio}


@contextmanager
def _without_terms(module: Any) -> Iterator[None]:
    with (
        mock.patch.object(module, "weights_digest", return_value=0),
        mock.patch.object(module.TokenColumns, "add", return_value=None),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least(6), default=24)
    parser.add_argument("--repeats", type=at_least(1), default=12)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/recording.json"))
    given = parser.parse_args()
    report = heading(given) | {"trainer": trainer_part(given.repeats)}
    output = given.output.absolute()
    with tempfile.TemporaryDirectory() as folder:
        report["run"] = run_part(given.steps, Path(folder))
    write_report(output, report)


if __name__ == "__main__":
    main()
