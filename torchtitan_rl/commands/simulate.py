"""``torchtitan-rl simulate CONFIG --profile FILE [options of the run]``: says what a run would be
like, with any number of replicas, devices and failures.

Exit codes: 0 done; 1 the simulated run fails; 2 an option is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torchtitan_rl.bounds import check_fields
from torchtitan_rl.config.loader import load_config, split_config, take_options
from torchtitan_rl.config.resume import run_fields
from torchtitan_rl.config.run import RunConfig, output_file_errors
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.files import replace_file
from torchtitan_rl.orchestration.config import capacity_errors
from torchtitan_rl.simulation.profile import Profile, read_profile
from torchtitan_rl.simulation.run import Simulated, simulate, simulation_errors

_PROG = "torchtitan-rl simulate"
HELP = f"""\
usage: {_PROG} CONFIG --profile FILE [options] [options of the run]

Says what a run would be like: the real controller, buffer, router and restarts on a virtual clock,
with replicas, trainer and environments as in the profile of a run of this policy and task.
  --profile FILE     what torchtitan-rl profile wrote
  --replicas N       as --generator.replicas
  --mtbf-hours H     mean hours between two failures of one replica; default: none fails
  --devices N        instead: find the best split of N devices between trainer and replicas
  --output FILE      also write the results as JSON
The trainer's time per token falls in proportion to its ranks. Evaluation and checkpoints are left
out. docs/scaling.md explains the numbers.
"""
_OPTIONS = ("--profile", "--replicas", "--mtbf-hours", "--devices", "--output")
_COARSE = 8  # splits of a first search
_MAX_RANKS = 4096  # see `bounds.Ranks`


def main(words: Sequence[str]) -> int:
    config_file, options = split_config(words, prog=_PROG)
    given, overrides = take_options(options, _OPTIONS)
    if "--profile" not in given:
        raise ConfigError("--profile is missing: give the FILE that torchtitan-rl profile wrote")
    mtbf_hours, devices = _number(given, "--mtbf-hours"), _number(given, "--devices")
    if "--replicas" in given:
        if devices is not None:
            raise ConfigError("--replicas: leave it out; --devices finds the best number of them")
        overrides += ["--generator.replicas", given["--replicas"]]
    config = load_config(config_file, overrides)
    check_fields(config)
    schedule, output = config.schedule, Path(given.get("--output", ""))
    errors = simulation_errors(config) + capacity_errors(
        staleness=schedule.staleness, max_share=schedule.max_overtaking_share
    )
    if "--output" in given:
        errors += output_file_errors("--output", output)
    least = config.generator.tensor_parallel + config.trainer.token_parts
    most = least * _MAX_RANKS
    if devices is not None and (not least <= devices <= most or devices % 1):
        errors.append(
            f"--devices is {given['--devices']}: give a whole number of at least {least} and at "
            f"most {most}"
        )
    if errors:
        raise ConfigError(errors)
    profile = read_profile(Path(given["--profile"]))
    if difference := profile.difference(run_fields(config)):
        raise ConfigError(f"{difference}; give that, or the profile of a run of this configuration")
    if devices is None:
        found = [simulate(config, profile, mtbf_hours=mtbf_hours)]
        print("\n".join(describe(found[0], mtbf_hours)))
    else:
        found = best_splits(config, profile, int(devices), mtbf_hours)
        print("\n".join(_describe_splits(found, config.trainer.token_parts)))
    if "--output" in given:
        document = json.dumps([one.to_json() for one in found], indent=1)
        replace_file(output, document.encode() + b"\n")
    return 0


def best_splits(
    config: RunConfig, profile: Profile, devices: int, mtbf_hours: float | None = None
) -> list[Simulated]:
    """Simulate splits of ``devices`` between trainer and replicas, the fastest one first. Each
    replica keeps its ranks, and the trainer its tensor and context parallelism. The search first
    spreads over all splits, then looks between the neighbours of the best one."""
    trainer, ranks = config.trainer, config.generator.tensor_parallel
    unit = trainer.token_parts
    most = (devices - ranks) // unit
    tried: dict[int, Simulated] = {}

    def run(shards: int) -> None:
        if shards in tried:
            return
        one = replace(
            config,
            trainer=replace(trainer, data_parallel_replicate=1, data_parallel_shard=shards),
            generator=replace(config.generator, replicas=(devices - shards * unit) // ranks),
        )
        tried[shards] = simulate(one, profile, mtbf_hours=mtbf_hours)

    low, high = 1, most
    while low <= high:
        step = -(-(high - low + 1) // _COARSE)
        for shards in (*range(low, high, step), high):
            run(shards)
        best = max(tried, key=lambda shards: tried[shards].steps_per_hour)
        if step == 1:
            break
        low, high = max(1, best - step + 1), min(most, best + step - 1)
    return sorted(tried.values(), key=lambda one: -one.steps_per_hour)


def describe(one: Simulated, mtbf_hours: float | None) -> list[str]:
    """Lines for a person."""
    expected = ""
    if mtbf_hours is not None:
        expected = f" ({one.replicas * one.simulated_s / 3600 / mtbf_hours:.2g} expected)"
    ages = ", ".join(f"{age} old {share:.0%}" for age, share in one.staleness.items())
    return [
        f"replicas {one.replicas:,}, trainer ranks {one.trainer_ranks:,}: {one.groups:,} groups, "
        f"{one.requests:,} requests in {one.simulated_s / 3600:.2f} h; {one.steps:,} steady steps",
        f"speed: {one.steps_per_hour:,.1f} steps an hour, {one.tokens_per_s:,.0f} tokens/s",
        f"idle: trainer {one.trainer_idle_share:.0%}, replicas {one.generator_idle_share:.0%}",
        f"staleness of tokens in versions: {ages}",
        f"queues: {one.groups_running:.1f} groups running and {one.groups_finished:.1f} finished "
        f"when a batch is taken; a rollout waits {one.place_s:.2f} s for its place",
        f"failures: {one.losses} replicas lost{expected}, {one.lost_tokens:,} tokens sampled "
        f"again, {one.replica_down_s:,.0f} s without a replica",
        f"controller: {one.loop_cpu_s:.1f} CPU s, {one.loop_cpu_us:.0f} us a request; its loop is "
        f"busy {one.loop_busy_share:.1%} of the time, and lags {1e3 * one.loop_lag_max_s:.0f} ms "
        f"at most, over 100 ms {one.late_share:.1%} of the time",
        f"simulated in {one.wall_s:.1f} s",
    ]


def _describe_splits(found: Sequence[Simulated], unit: int) -> list[str]:
    rows = [
        f"{one.trainer_ranks:>8,}{one.replicas:>10,}{one.steps_per_hour:>14,.1f}"
        f"{one.trainer_idle_share:>14.0%}{one.generator_idle_share:>15.0%}"
        for one in found
    ]
    return [
        " trainer  replicas  steps an hour  trainer idle  replicas idle",
        *rows,
        "the fastest: --trainer.data-parallel-replicate 1 --trainer.data-parallel-shard "
        f"{found[0].trainer_ranks // unit} --generator.replicas {found[0].replicas}",
    ]


def _number(given: dict[str, str], name: str) -> float | None:
    if name not in given:
        return None
    with suppress(ValueError):
        if 0 < (value := float(given[name])) < 1e9:
            return value
    raise ConfigError(f"{name} is {given[name]!r}: give a number above 0, below 1e9")
