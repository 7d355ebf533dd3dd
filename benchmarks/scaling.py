"""Simulated runs of 1 to 4,096 replicas: speed, idle shares, and what the controller's loop does.

    python -m benchmarks.scaling [--parts curve] [--replicas 1 16 ...] [--profile FILE]

A run of a million groups::

    python -m benchmarks.scaling --parts curve --replicas 4096 --steps 16 --group-size 2

Without ``--profile`` the replicas are assumed: 64 requests at once sample 2,000 tokens/s (24 ms
a step and 0.125 ms for each request), answers have 1,000 tokens on average (lognormal, at most
4,000), weights take 2 s to fetch and 0.5 s to swap, and a trainer rank trains 5,000 sampled
tokens/s. Each replica gets 64 rollouts in each step, S = 3, and half a trainer rank: that keeps
replicas full.

| part | |
|---|---|
| curve | one run of each size |
| reports | a run with the replicas' reports of progress and the journal |
| failures | what they cost |
| loop | where the loop's time goes: cProfile, by file, and its work for each request |
| splits | the best split of a number of devices between trainer and replicas |
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import random
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.options import at_least
from benchmarks.plots import figure
from benchmarks.report import heading, write_report
from torchtitan_rl.commands.simulate import best_splits
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.processes import collect_less
from torchtitan_rl.simulation.profile import (
    Decoding,
    Losses,
    Profile,
    RecordedTurns,
    Syncs,
    Training,
    read_profile,
)
from torchtitan_rl.simulation.run import simulate

_SIZES = (1, 4, 16, 64, 256, 1024)
_FEW = 16  # replicas of the runs that are not of the curve
_FILES = 14  # shown of the profile
_WORK = {
    ("~", "<method 'run' of '_contextvars.Context' objects>"): "callbacks",
    ("base_events.py", "create_task"): "tasks",
    ("base_events.py", "call_at"): "timers",
    ("dataclasses.py", "replace"): "copies of dataclasses",
}


def main() -> None:
    options = _options()
    profile = assumed_profile() if options.profile is None else read_profile(options.profile)
    report: dict[str, Any] = heading(options)
    collect_less(full_after=5000)

    def run_of(replicas: int, steps: int = options.steps) -> RunConfig:
        return _run_of(replicas, steps, options.groups_per_replica, options.group_size)

    def ran(part: str, result: Any) -> None:
        report[part] = result
        write_report(options.output, report)  # what is there, should a later part take too long

    parts, few = options.parts, run_of(_FEW)
    for size in options.replicas if "curve" in parts else ():
        one = simulate(run_of(size), profile).to_json()
        one["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ran("curve", [*report.get("curve", ()), one])
        print(f"{size:,} replicas in {one['wall_s']:.0f} s", flush=True)
    if "reports" in parts:
        ran("reports", simulate(few, profile, reports=True).to_json())
    if "failures" in parts:
        run, hours = run_of(_FEW, 4 * options.steps), (None, 1.0)
        ran("failures", [simulate(run, profile, mtbf_hours=one).to_json() for one in hours])
    if "loop" in parts:
        ran("loop", _loop(few, profile))
    if "splits" in parts:
        found = {
            number: [one.to_json() for one in best_splits(run_of(number // 2), profile, number)]
            for number in options.devices
        }
        ran("splits", found)
    _print(report)
    if "curve" in report and "splits" in report:
        _draw(options.output.with_suffix(".png"), report)


def assumed_profile() -> Profile:
    chance = random.Random(0)
    lengths = [min(4000, round(math.exp(chance.gauss(6.78, 0.5)))) for _ in range(2048)]
    rollouts = [
        RecordedTurns(
            prompt_tokens=(200,),
            sampled_tokens=(max(1, length),),
            environment_s=(0.05, 0.5),
            reward=float(chance.random() < 0.5),
        )
        for length in lengths
    ]
    return Profile(
        source="assumed",
        steps=1,
        groups=tuple(tuple(rollouts[n : n + 4]) for n in range(0, len(rollouts), 4)),
        decoding=Decoding(
            step_s=24e-3,
            request_s=0.125e-3,
            first_token_s=3e-3,
            error=0.0,
            max_running=64,
            kv_cache_tokens=400_000,
        ),
        training=Training(token_s=(0.2e-3,), publish_s=(1.0,), ranks=1),
        syncs=Syncs(stage_s=(2.0,), pull_s=(0.5,), stall_s=(0.2,)),
        losses=Losses(lost_replicas=0, replica_hours=0.0, detect_s=1.0, restart_s=180.0),
    )


def _run_of(replicas: int, steps: int, groups_per_replica: int, group_size: int) -> RunConfig:
    words = [
        *("--num-steps", f"{steps}", "--schedule.staleness", "3"),
        *("--generator.replicas", f"{replicas}"),
        *("--rollout.groups-per-step", f"{groups_per_replica * replicas}"),
        *("--rollout.group-size", f"{group_size}"),
        *("--rollout.max-total-tokens", "16384"),
        *("--rollout.sampling.max-tokens-per-turn", "8192"),
        *("--trainer.data-parallel-shard", f"{max(1, replicas // 2)}"),
    ]
    config = load_config(Path("alphabet_sort_tiny"), words)
    return replace(config, generator=replace(config.generator, max_running_requests=64))


def _loop(run: RunConfig, profile: Profile) -> dict[str, Any]:
    """The share of each file in the loop's time, under cProfile, and counts for each request."""
    profiler = cProfile.Profile()
    profiler.enable()
    found = simulate(run, profile)
    profiler.disable()
    by_file: Counter[str] = Counter()
    work: Counter[str] = Counter()
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (path, _, function), (_, calls, seconds, _, _) in stats.items():
        by_file["/".join(Path(path).parts[-2:])] += seconds
        work[_WORK.get((Path(path).name, function), "")] += calls
    total = by_file.total()
    return {
        "replicas": found.replicas,
        "share_of_time": {
            {"~": "built-in functions"}.get(name, name): seconds / total
            for name, seconds in by_file.most_common(_FILES)
        },
        "for_a_request": {name: work[name] / found.requests for name in _WORK.values()},
    }


def _print(report: dict[str, Any]) -> None:
    """Print the tables of docs/scaling.md."""
    if curve := report.get("curve"):
        rows = [
            [
                f"{one['replicas']:,}",
                f"{one['requests']:,}",
                f"{one['tokens_per_s']:,.0f}",
                f"{one['trainer_idle_share']:.0%} / {one['generator_idle_share']:.0%}",
                f"{one['loop_cpu_us'] / 1e3:.2f} ms",
                f"{one['loop_busy_share']:.1%}",
                f"{1e3 * one['loop_lag_max_s']:,.0f} ms",
                f"{one['late_share']:.1%}",
                f"{one['wall_s']:,.0f} s",
                f"{one['peak_bytes'] / 1e9:.1f} GB",
            ]
            for one in curve
        ]
        header = ["replicas", "requests", "tokens/s", "trainer / replicas idle", "loop per request"]
        _table([*header, "loop busy", "largest lag", "lag > 100 ms", "wall time", "memory"], rows)
    if one := report.get("reports"):
        print(f"\nwith reports and journal: {one['loop_cpu_us'] / 1e3:.2f} ms per request")
    if "failures" in report:
        calm, failing = report["failures"]
        print(
            f"\none failure per replica and hour: {failing['losses']} losses, "
            f"{failing['lost_tokens']:,} tokens again, "
            f"{failing['steps_per_hour'] / calm['steps_per_hour'] - 1:+.1%} steps/h"
        )
    if loop := report.get("loop"):
        _table(["file", "time"], [[a, f"{b:.1%}"] for a, b in loop["share_of_time"].items()])
        _table(["for a request", ""], [[a, f"{b:.1f}"] for a, b in loop["for_a_request"].items()])
    if splits := report.get("splits"):
        _table(
            ["devices", "trainer + replicas", "steps/h", "trainer idle", "replicas idle"],
            [
                [
                    f"{number}",
                    f"{best['trainer_ranks']} + {best['replicas']}",
                    f"{best['steps_per_hour']:,.1f}",
                    f"{best['trainer_idle_share']:.0%}",
                    f"{best['generator_idle_share']:.0%}",
                ]
                for number, (best, *_) in splits.items()
            ],
        )
        number, tried = list(splits.items())[len(splits) // 2]
        most = max(one["steps_per_hour"] for one in tried)
        print(f"\n{number} devices: trainer + replicas, steps an hour")
        for one in sorted(tried, key=lambda one: one["trainer_ranks"]):
            bar = "#" * round(50 * one["steps_per_hour"] / most)
            names = f"{one['trainer_ranks']} + {one['replicas']}"
            print(f"{names:>9} {one['steps_per_hour']:6.1f} {bar}")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print()
    for row in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(row)} |")


def _draw(path: Path, report: dict[str, Any]) -> None:
    curve, sizes = report["curve"], [one["replicas"] for one in report["curve"]]
    with figure(path, size=(12, 3.6), columns=3) as (speed, loop, split):
        speed.loglog(sizes, [one["tokens_per_s"] for one in curve], marker="o")
        speed.set(xlabel="replicas", ylabel="tokens/s")
        loop.loglog(sizes, [one["loop_busy_share"] for one in curve], marker="o")
        loop.axhline(1.0, color="#cc6677", linestyle="--")
        loop.set(xlabel="replicas", ylabel="share of the loop's time")
        for number, tried in report["splits"].items():
            tried = sorted(tried, key=lambda one: one["trainer_ranks"])
            ranks = [one["trainer_ranks"] / int(number) for one in tried]
            split.plot(ranks, [one["steps_per_hour"] for one in tried], marker="o", label=number)
        split.set(xlabel="trainer's share of the devices", ylabel="steps an hour")
        split.legend()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("curve", "reports", "failures", "loop", "splits")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--replicas", nargs="+", type=at_least(1), default=list(_SIZES))
    parser.add_argument("--steps", type=at_least(5), default=10)
    parser.add_argument("--groups-per-replica", type=at_least(1), default=16, help="of a step")
    parser.add_argument("--group-size", type=at_least(2), default=4)
    parser.add_argument("--devices", nargs="+", type=at_least(2), default=[8, 24, 64])
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/scaling.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
