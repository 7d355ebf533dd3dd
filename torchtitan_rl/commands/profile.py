"""``torchtitan-rl profile RUN_DIR [--output FILE]``: writes how long the parts of a run took, for
``torchtitan-rl simulate``.

Exit codes: 0 done; 2 there is no run, or its records lack what a profile needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from torchtitan_rl.config.run import output_file_errors
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.simulation.profile import Profile, profile_run, write_profile

HELP = """\
usage: torchtitan-rl profile RUN_DIR [--output FILE]

Writes how long the parts of a run took, for torchtitan-rl simulate: prompts, lengths and delays of
its rollouts, decoding by the number of requests that run together, steps of the trainer, weight
syncs, and lost replicas. Give a run that wrote all of its rollouts
(--metrics.rollouts-per-step all); otherwise only rollouts that were written at random are used.
  --output FILE     default: profile.json in the run's folder
"""


def main(words: Sequence[str]) -> int:
    match list(words):
        case [run] if not run.startswith("-"):
            output = Path(run) / "profile.json"
        case [run, "--output", file] | ["--output", file, run] if not run.startswith("-"):
            output = Path(file)
        case _:
            raise ConfigError(f"RUN_DIR: give the folder of one run; {HELP.splitlines()[0]}")
    profile = profile_run(Path(run))
    if errors := output_file_errors("--output", output):
        raise ConfigError(errors)
    write_profile(profile, output)
    print("\n".join([*_describe(profile), f"written to {output}"]))
    return 0


def _describe(profile: Profile) -> list[str]:
    decoding, training, losses = profile.decoding, profile.training, profile.losses
    rollouts = [one for group in profile.groups for one in group]
    lengths = [sum(one.sampled_tokens) for one in rollouts]
    delays = [sum(one.environment_s) for one in rollouts]
    lost = f"{losses.lost_replicas} lost in {losses.replica_hours:.2f} replica hours"
    number = f"{len(rollouts)} in {len(profile.groups)} groups"
    step_ms, request_ms = 1e3 * decoding.step_s, 1e3 * decoding.request_s
    return [
        f"{profile.source}: {profile.steps} steps after the first",
        f"rollouts: {number}, of {median(lengths):.0f} tokens (at most {max(lengths)}); "
        f"{fmean(delays):.2f} s in environments",
        f"decoding: {step_ms:.2f} ms a step and {request_ms:.3f} ms for each request, wrong by "
        f"{decoding.error:.0%}; {1e3 * decoding.first_token_s:.2f} ms more for a first token",
        f"trainer: {1e3 * fmean(training.token_s):.3f} ms for a sampled token, publishing "
        f"{fmean(training.publish_s):.2f} s",
        f"weight syncs: {fmean(profile.syncs.stage_s):.2f} s to fetch, "
        f"{fmean(profile.syncs.pull_s):.2f} s to swap",
        f"replicas: {lost}; {losses.restart_s:.0f} s to start again",
    ]
