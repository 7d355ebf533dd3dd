"""Measures the rollout phase of a step when a few answers are 10 to 20 times the median length.

    python -m benchmarks.long_tail [--steps 10] [--repeats 3] [--modes NAME ...] [--policy DIR]

Modes differ in the settings of `schedule` only; all get the same problems, whose answers have the
same lengths. They run alternately on the same replicas, with the real controller and router. The
trainer is simulated: it takes ``--train-s`` per step and publishes new versions.

- synchronous: a batch starts under new weights and waits for its slowest answer;
- over-admit restart: one and a half batches of groups are started, and the first groups to finish
  are trained. The other groups start again and must be in the next batch, so that long answers are
  trained as often as short ones;
- over-admit running, over-admit aborted: as before, but the other groups continue under the new
  weights (``aborted``: after an interruption), and are trained at most one version later;
- window S: at staleness S, up to a whole batch of groups may overtake a slow group;
- async S: at staleness S, no group is overtaken, and S more batches are generated at the same time.

Batches that were started together end together, when the longest of their answers ends. So steps
come in bursts of S + 1. Only whole bursts are counted, after the first burst and before the last
step. The rollout phase is the time that the trainer waits for its batch. Groups per second are
computed over whole steps. Age is the number of versions between the sampling of a token and the
training on it. The limit is the time for the same answers if all problems are known in advance, the
longest answers start first, and no weights are pulled.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.generation import with_room
from benchmarks.long_tail_run import (
    FinishedRun,
    Setting,
    run_limit,
    run_mode,
    running_replicas,
)
from benchmarks.long_tail_work import LongTail
from benchmarks.options import at_least
from benchmarks.plots import bars
from benchmarks.report import heading, medians, print_table, write_report
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.orchestration.config import ScheduleConfig
from torchtitan_rl.orchestration.records import StepRecord

PLAIN = "synchronous"
MODES = {
    PLAIN: ScheduleConfig(staleness=0),
    "over-admit restart": ScheduleConfig(staleness=0, max_overtaking_share=0.5),
    "over-admit running": ScheduleConfig(staleness=1, max_overtaking_share=0.5),
    "over-admit aborted": ScheduleConfig(
        staleness=1, max_overtaking_share=0.5, during_training="pause"
    ),
    "window S=2": ScheduleConfig(staleness=2, max_overtaking_share=1.0),
    "window S=4": ScheduleConfig(staleness=4, max_overtaking_share=1.0),
    "async S=1": ScheduleConfig(staleness=1),
    "async S=2": ScheduleConfig(staleness=2),
    "async S=4": ScheduleConfig(staleness=4),
}
TARGET = 2.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The steps of a mode that are counted: those from ``first`` to ``last``. One more step
    follows."""

    first: int
    last: int

    @property
    def number(self) -> int:
        return self.last - self.first + 1


def counted_steps(schedule: ScheduleConfig, at_least: int) -> Counted:
    burst = schedule.staleness + 1
    warm_up = max(2, burst)
    return Counted(first=warm_up + 1, last=warm_up + burst * ceil(at_least / burst))


def main() -> None:
    options = _options()
    tail = LongTail(
        groups_per_step=options.groups,
        group_size=options.group_size,
        median=options.median,
        long_share=options.long_share,
    )
    policy = with_room(options.policy, tail.prompt + tail.longest)
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    setting = Setting(
        policy=policy.absolute(),
        tail=tail,
        folder=Path(tempfile.mkdtemp(prefix="long-tail-")),
        train_s=options.train_s,
        replicas=options.replicas,
        max_running=options.max_running,
        keeps_kv=options.keep_kv,
        device=options.device,
        # The controller computes on the first core.
        cores=tuple(cores[: options.replicas]) if options.replicas < len(cores) else (),
    )
    report = heading(options)
    measured, limits = asyncio.run(_measure(setting, options))
    report |= {
        "answers": asdict(tail) | {"long_per_step": tail.num_long, "longest": tail.longest},
        "modes": {name: _medians(repeats) for name, repeats in measured.items()},
        "limit_groups_per_second": statistics.median(limits),
        "limit_repeats": limits,
        "repeats": measured,
    }
    report["ratios"] = _ratios(report["modes"])
    _print(report["modes"], report["ratios"], report["limit_groups_per_second"])
    write_report(options.output, report)
    bars(
        options.output.with_suffix(".png"),
        {name: row["groups_per_second"] for name, row in report["modes"].items()}
        | {"limit": report["limit_groups_per_second"]},
        title=f"{tail.groups_per_step} groups of {tail.group_size} a step, median {tail.median}, "
        f"{tail.num_long} answers of 10-20 x",
        label="groups/s",
    )


async def _measure(
    setting: Setting, options: argparse.Namespace
) -> tuple[dict[str, list[dict[str, Any]]], list[float]]:
    """Measure all modes. Returns the figures of each repeat by mode, and the limits in groups per
    second."""
    limits: list[float] = []
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in options.modes}
    num_groups = setting.tail.groups_per_step * options.steps
    async with running_replicas(setting) as replicas:
        for repeat in range(options.repeats):
            for name in options.modes:
                counted = counted_steps(MODES[name], options.steps)
                label = f"{name.replace(' ', '-')}-{repeat}"
                run = await run_mode(
                    setting, MODES[name], replicas, name=label, num_steps=counted.last + 1
                )
                figures = figures_of(run, setting.tail, counted)
                measured[name].append(figures)
                print(f"{label}: {figures['groups_per_second']:.1f} groups/s", flush=True)
            limits.append(num_groups / await run_limit(setting, replicas, num_groups=num_groups))
    return measured, limits


def figures_of(run: FinishedRun, tail: LongTail, counted: Counted) -> dict[str, Any]:
    """
    Raises:
        RuntimeError: an answer does not have the length that was drawn for it.
    """
    before = run.steps[counted.first - 2]
    steps = run.steps[counted.first - 1 : counted.last]
    lengths = [length for step in steps for length in _lengths(step, tail)]
    ages = [age for step in steps for age in _ages(step)]
    num_groups = sum(len(step.groups) for step in steps)
    tokens = _tokens(before, steps[-1])
    stalls = [pull.stall_s for step in steps for sync in step.syncs for pull in sync.pulls]
    seconds = sum(step.wall_s for step in steps)
    return {
        "steps": counted.number,
        "rollout_s": statistics.fmean(step.rollout_s for step in steps),
        "step_s": seconds / len(steps),
        "groups_per_second": num_groups / seconds,
        "seconds_per_sample": seconds / len(lengths),
        "tokens_per_second": sum(lengths) / seconds,
        "tokens": tokens,
        "trained_of_generated": tokens["trained"] / (tokens["trained"] + tokens["thrown_away"]),
        "age_mean": statistics.fmean(ages),
        "age_max": max(ages),
        "length_mean": statistics.fmean(lengths),
        "length_max": max(lengths),
        "long_per_step": sum(map(tail.is_long, lengths)) / len(steps),
        "pull_stall_s": statistics.fmean(stalls) if stalls else None,
        "mean_batch": run.mean_batch,
        "rollout_s_of_steps": [round(step.rollout_s, 4) for step in run.steps],
    }


def _lengths(step: StepRecord, tail: LongTail) -> list[int]:
    lengths = []
    for rollout in (rollout for group in step.groups for rollout in group.rollouts):
        length = rollout.num_sampled_tokens
        if length != tail.length_of(rollout.rollout_id):
            raise RuntimeError(
                f"{rollout.rollout_id} has {length} tokens, not "
                f"{tail.length_of(rollout.rollout_id)}: {rollout.status}, {rollout.cause}"
            )
        lengths.append(length)
    return lengths


def _ages(step: StepRecord) -> list[int]:
    """The age of each token. The step trained at version ``step.version`` - 1."""
    return [
        step.version - 1 - version
        for group in step.groups
        for rollout in group.rollouts
        for turn in rollout.turns
        for version in turn.completion.versions
    ]


def _tokens(before: StepRecord, last: StepRecord) -> dict[str, Any]:
    """The tokens that the ledger recorded from the end of one step to the end of another. No tokens
    are masked in this benchmark."""
    if before.totals is None or last.totals is None:
        raise RuntimeError("a step was recorded without the ledger's totals")
    thrown = Counter(last.totals.tokens_discarded)
    thrown.subtract(before.totals.tokens_discarded)
    return {
        "trained": last.totals.tokens_trained - before.totals.tokens_trained,
        "thrown_away": thrown.total(),
        "by_cause": {cause: number for cause, number in sorted(thrown.items()) if number},
    }


def _medians(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tokens = medians([one["tokens"] for one in repeats])
    causes = sorted({cause for one in repeats for cause in one["tokens"]["by_cause"]})
    named = {f"tokens_{name}": number for name, number in tokens.items()}
    return medians(repeats) | named | {"causes": causes}


def _ratios(modes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as fast each mode is as the plain synchronous mode; empty if the latter was
    not measured."""
    if PLAIN not in modes:
        return {}
    plain = modes[PLAIN]
    return {
        name: {
            "rollout_phase": plain["rollout_s"] / max(row["rollout_s"], 1e-9),
            "groups_per_second": row["groups_per_second"] / plain["groups_per_second"],
        }
        for name, row in modes.items()
    }


def _print(
    modes: Mapping[str, Mapping[str, Any]],
    ratios: Mapping[str, Mapping[str, float]],
    limit: float,
) -> None:
    rows = []
    for name, row in modes.items():
        ratio = ratios.get(name, {})
        rows.append(
            [
                name,
                f"{row['rollout_s']:.2f}",
                f"{ratio['rollout_phase']:.2f}x" if ratio else "-",
                f"{row['groups_per_second']:.1f}",
                f"{ratio['groups_per_second']:.2f}x" if ratio else "-",
                f"{row['groups_per_second'] / limit:.0%}",
                f"{row['tokens_trained'] / row['steps']:,.0f}",
                f"{row['tokens_thrown_away'] / row['steps']:,.0f}",
                f"{row['age_mean']:.2f}",
                f"{row['age_max']:.0f}",
                f"{row['length_mean']:.1f}",
                f"{row['length_max']:.0f}",
                f"{row['long_per_step']:.2f}",
                f"{row['mean_batch']:.1f}",
            ]
        )
    header = [
        "mode", "rollout s", "", "groups/s", "", "of limit", "tokens/step", "thrown",
        "age", "max", "length", "max", "long/step", "batch",
    ]  # fmt: skip
    print_table(header, rows)
    best = max((name for name in ratios), key=lambda n: ratios[n]["groups_per_second"], default="")
    if best:
        value = ratios[best]["groups_per_second"]
        most = limit / modes[PLAIN]["groups_per_second"]
        print(
            f"best: {best}, {value:.2f} x plain synchronous (target {TARGET}); "
            f"limit: {limit:.1f} groups/s, {most:.2f} x"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=Path, default=POLICY_DIR)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--groups", type=int, default=8, help="per step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--median", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--long-share", type=float, default=0.05, help="of the answers")
    parser.add_argument(
        "--train-s", type=float, default=0.05, help="of the simulated trainer, each step"
    )
    parser.add_argument("--max-running", type=int, default=128)
    parser.add_argument("--keep-kv", action="store_true", help="at pulls, of running requests")
    parser.add_argument("--steps", type=int, default=10, help="that are counted, at least")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/long_tail.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
