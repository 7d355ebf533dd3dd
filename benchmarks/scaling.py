"""Simulated runs of 1 to 4,096 replicas: speed, idle shares, and what the controller's loop does.

    python -m benchmarks.scaling [--replicas 1 16 ...] [--steps 6] [--profile FILE]

Without ``--profile`` the replicas are assumed: 64 requests at once sample 2,000 tokens/s (24 ms
a step and 0.125 ms for each request), answers have 1,000 tokens on average (lognormal), weights
take 2 s to fetch and 0.5 s to swap, and a trainer rank trains 1,000 sampled tokens/s. Each replica
gets a group of 4 rollouts in each step, S = 1, and half a trainer rank.

Also the split of devices between trainer and replicas, what failures cost, and where the loop's
time goes (cProfile, by file).
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.options import at_least
from benchmarks.plots import figure
from benchmarks.report import heading, print_table, write_report
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

_SIZES = (1, 4, 16, 64, 256, 1024, 4096)
_PROFILED = 64  # replicas of the run under cProfile
_FILES = 14  # shown of it


def main() -> None:
    options = _options()
    profile = assumed_profile() if options.profile is None else read_profile(options.profile)
    report: dict[str, Any] = heading(options)
    collect_less()
    report["curve"] = []
    for size in options.replicas:
        one = simulate(run_of(size, options.steps, options.most_groups), profile).to_json()
        report["curve"].append(one)
        print(f"{size:,} replicas in {one['wall_s']:.0f} s", flush=True)
        write_report(options.output, report)  # what is there, should a later size take too long
    few = min(16, max(options.replicas))
    report["with_reports"] = simulate(run_of(few, options.steps), profile, reports=True).to_json()
    report["failures"] = [
        simulate(run_of(few, 4 * options.steps), profile, mtbf_hours=hours).to_json()
        for hours in (None, 1.0)
    ]
    report["loop"] = _loop(min(_PROFILED, max(options.replicas)), profile)
    report["splits"] = [
        one.to_json() for one in best_splits(run_of(16, options.steps), profile, options.devices)
    ]
    write_report(options.output, report)
    _print(report)
    _draw(options.output.with_suffix(".png"), report)


def assumed_profile() -> Profile:
    chance = random.Random(0)
    lengths = [min(8000, round(math.exp(chance.gauss(6.4, 1.0)))) for _ in range(2048)]
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
        training=Training(token_s=(1e-3,), publish_s=(1.0,), ranks=1),
        syncs=Syncs(stage_s=(2.0,), pull_s=(0.5,), stall_s=(0.2,)),
        losses=Losses(lost_replicas=0, replica_hours=0.0, detect_s=1.0, restart_s=180.0),
    )


def run_of(replicas: int, steps: int, most_groups: int = 1 << 16) -> RunConfig:
    groups = min(max(4, replicas), most_groups)
    words = [
        *("--num-steps", f"{steps}", "--schedule.staleness", "1"),
        *("--generator.replicas", f"{replicas}"),
        *("--rollout.groups-per-step", f"{groups}", "--rollout.group-size", "4"),
        *("--rollout.max-total-tokens", "16384"),
        *("--rollout.sampling.max-tokens-per-turn", "8192"),
        *("--trainer.data-parallel-shard", f"{max(1, replicas // 2)}"),
    ]
    config = load_config(Path("alphabet_sort_tiny"), words)
    return replace(config, generator=replace(config.generator, max_running_requests=64))


def _loop(replicas: int, profile: Profile) -> dict[str, Any]:
    """The share of each file in the loop's time, under cProfile."""
    profiler = cProfile.Profile()
    profiler.enable()
    simulate(run_of(replicas, 5), profile)
    profiler.disable()
    by_file: Counter[str] = Counter()
    for (path, _, _), (_, _, seconds, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        by_file["/".join(Path(path).parts[-2:])] += seconds
    total = by_file.total()
    shares = {name: seconds / total for name, seconds in by_file.most_common(_FILES)}
    return {"replicas": replicas, "share_of_time": shares}


def _print(report: dict[str, Any]) -> None:
    rows = [
        [
            f"{one['replicas']:,}",
            f"{one['steps_per_hour']:,.1f}",
            f"{one['tokens_per_s']:,.0f}",
            f"{one['trainer_idle_share']:.0%}",
            f"{one['generator_idle_share']:.0%}",
            f"{one['loop_cpu_us']:,.0f}",
            f"{one['loop_busy_share']:.1%}",
            f"{1e3 * one['loop_lag_max_s']:,.0f}",
            f"{one['wall_s']:.0f}",
        ]
        for one in report["curve"]
    ]
    header = ["replicas", "steps/h", "tokens/s", "trainer idle", "replicas idle"]
    print_table([*header, "us/request", "loop busy", "lag ms", "wall s"], rows)
    print(f"with reports and journal: {report['with_reports']['loop_cpu_us']:,.0f} us a request")
    for name, share in report["loop"]["share_of_time"].items():
        print(f"{share:6.1%} {name}")
    for one in report["splits"]:
        print(f"{one['trainer_ranks']} + {one['replicas']}: {one['steps_per_hour']:,.1f} steps/h")
    calm, failing = report["failures"]
    print(
        f"one failure per replica and hour: {failing['losses']} losses, "
        f"{failing['lost_tokens']:,} tokens again, "
        f"{failing['steps_per_hour'] / calm['steps_per_hour'] - 1:+.1%} steps/h"
    )


def _draw(path: Path, report: dict[str, Any]) -> None:
    curve, splits = report["curve"], sorted(report["splits"], key=lambda one: one["trainer_ranks"])
    sizes = [one["replicas"] for one in curve]
    with figure(path, size=(12, 3.6), columns=3) as (speed, loop, split):
        speed.loglog(sizes, [one["tokens_per_s"] for one in curve], marker="o")
        speed.set(xlabel="replicas", ylabel="tokens/s")
        loop.loglog(sizes, [one["loop_busy_share"] for one in curve], marker="o")
        loop.axhline(1.0, color="#cc6677", linestyle="--")
        loop.set(xlabel="replicas", ylabel="share of the loop's time")
        split.plot(
            [one["trainer_ranks"] for one in splits],
            [one["steps_per_hour"] for one in splits],
            marker="o",
        )
        total = splits[0]["trainer_ranks"] + splits[0]["replicas"]
        split.set(xlabel=f"trainer ranks of {total} devices", ylabel="steps an hour")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", nargs="+", type=at_least(1), default=list(_SIZES))
    parser.add_argument("--steps", type=at_least(5), default=6)
    parser.add_argument("--most-groups", type=at_least(4), default=1 << 16, help="of a step")
    parser.add_argument("--devices", type=at_least(2), default=24)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/scaling.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
