"""Compares simulated runs with real ones.

    python -m benchmarks.simulation [--only NAME ...] [--wait-s SECONDS] [--learning-rate RATE]

Four runs of the tiny demo on this machine: one replica at S = 0, two at S = 2, one at S = 2 with an
environment that takes a second for each turn, and two at S = 2 of which one is killed. Each is then
predicted from the profile of *another* run; what differs between the two is only what the option
names: replicas, staleness, the environment's second, the kill. Steps per hour and idle shares are
those of the steps without the first and last S + 1.

With ``--wait-s 0.03`` each step of an engine waits so long without using a core, as one on a device
does. Without it, the parts of a run slow each other down on a machine with fewer cores than
processes, which is not simulated. With ``--learning-rate 1e-9`` the policy stays as it is, and with
it the lengths of its answers, which otherwise drift in each run in another way.

A run that exists in ``--folder`` is not repeated. With ``--recorded RUN SOURCE DELAY_S`` (several
times) nothing is run: RUN, the folder of a real run, is predicted from the profile of SOURCE, with
DELAY_S more in each turn's environment.

The measured idle share of the replicas is that of their traces: the part of the time without a
``decode`` span. ``overlap/generator_idle_share``, which is in the file too, has a reading each
0.25 s, and none while the controller's loop is busy, just when requests begin.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import heading, print_table, write_report
from tests.support.waiting_engines import environment
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.observability.failures import read_failures
from torchtitan_rl.observability.recorded import read_recorded
from torchtitan_rl.simulation.profile import Profile, profile_run
from torchtitan_rl.simulation.run import simulate

_SLOW = "tests/real/slow_env_config.py"
_SLOW_S = 1.0  # of each turn of the slow environment
_COMMON = (
    *("--evaluation.num-problems", "0", "--metrics.rollouts-per-step", "all"),
    *("--checkpoint.every", "0", "--metrics.trackers", "--trainer.threads", "1"),
    *("--rollout.groups-per-step", "8", "--rollout.group-size", "4"),
)
_LIMIT_S = 240.0  # of a run
_KILL_AFTER = 6  # steps


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. ``source``: the run from whose profile it is predicted."""

    source: str
    replicas: int
    staleness: int
    steps: int
    config: str = "alphabet_sort_tiny"
    is_killed: bool = False

    @property
    def options(self) -> list[str]:
        return [
            *_COMMON,
            *("--generator.replicas", f"{self.replicas}", "--num-steps", f"{self.steps}"),
            *("--schedule.staleness", f"{self.staleness}"),
        ]


CASES = {
    "1 replica, S = 0": Case(source="2 replicas, S = 2", replicas=1, staleness=0, steps=16),
    "2 replicas, S = 2": Case(source="1 replica, S = 0", replicas=2, staleness=2, steps=24),
    "slow environment": Case(
        source="1 replica, S = 0", replicas=1, staleness=2, steps=20, config=_SLOW
    ),
    "killed replica": Case(
        source="2 replicas, S = 2", replicas=2, staleness=2, steps=60, is_killed=True
    ),
}


def main() -> None:
    options = _options()
    report: dict[str, Any] = heading(options)
    cases: dict[str, dict[str, Any]] = {}
    for run, source, delay_s in options.recorded:
        cases[run] = compare(Path(run), Path(source), delay_s=float(delay_s))
    for name in () if options.recorded else options.only:
        folder = options.folder / _folder(name)
        if not (folder / "metrics.jsonl").exists():
            _run(CASES[name], folder, options)
    for name in () if options.recorded else options.only:
        cases[name] = _compare(name, options.folder)
    _print(cases)
    write_report(options.output, report | {"load_after": os.getloadavg(), "cases": cases})


def _folder(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _run(case: Case, folder: Path, options: argparse.Namespace) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    waiting = environment(folder.parent, options.wait_s) if options.wait_s else {}
    words = ["train", case.config, *case.options, "--output-dir", str(folder.parent)]
    if options.learning_rate is not None:
        words += ["--trainer.optimizer.learning-rate", f"{options.learning_rate}"]
    command = [sys.executable, "-m", "torchtitan_rl.commands.cli", *words, "--name", folder.name]
    started_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | waiting) as run:
        try:
            if case.is_killed:
                _kill(run, folder)
            run.wait(_LIMIT_S)
        finally:
            run.terminate()
    print(f"{folder.name}: {time.monotonic() - started_s:.0f} s, code {run.returncode}", flush=True)


def _kill(run: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill the first replica after `_KILL_AFTER` steps, and note when."""
    while run.poll() is None:
        path = folder / "metrics.jsonl"
        if path.exists() and path.read_bytes().count(b'"kind":"step"') >= _KILL_AFTER:
            break
        time.sleep(0.2)
    for process in psutil.Process(run.pid).children(recursive=True):
        if _prints_to(process) == "replica0-rank0.log":
            process.kill()
            (folder / "killed.json").write_text(json.dumps(time.time()))
            return


def _prints_to(process: psutil.Process) -> str:
    """The name of the log of a process that leads its group, which helpers do not."""
    try:
        path = os.readlink(f"/proc/{process.pid}/fd/1")
        return Path(path).name if os.getpgid(process.pid) == process.pid else ""
    except OSError:
        return ""


def _compare(name: str, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    return compare(
        folder / _folder(name),
        folder / _folder(case.source),
        delay_s=_SLOW_S if case.config == _SLOW else 0.0,
    )


def compare(run: Path, source: Path, *, delay_s: float) -> dict[str, Any]:
    """Predict a run from the profile of another."""
    identity, rows, edge = _read(run)
    kept = rows[edge:-edge]
    seconds = sum(row["time/step_s"] for row in kept)

    def share(name: str) -> float:
        return sum(row.get(name, 0.0) * row["time/step_s"] for row in kept) / seconds

    measured = {
        "steps_per_hour": 3600 * len(kept) / seconds,
        "trainer_idle_share": share("overlap/trainer_idle_share"),
        "generator_idle_share": _idle_in_traces(run, rows[edge - 1], kept[-1]),
    }
    killed, begun_s = run / "killed.json", rows[0]["wall_time_s"] - rows[0]["time/step_s"]
    deaths = [(json.loads(killed.read_text()) - begun_s, 0)] if killed.exists() else []
    profile = _slowed(profile_run(source), delay_s)
    simulated = simulate(_config_of(identity, len(rows)), profile, deaths=deaths).to_json()
    predicted = {figure: simulated[figure] for figure in measured}
    return {
        "run": str(run),
        "source": str(source),
        "setting": {name: identity.get(name) for name in _FIELDS},
        "measured": measured | {"readings_idle_share": share("overlap/generator_idle_share")},
        "predicted": predicted,
        "speed_error": predicted["steps_per_hour"] / measured["steps_per_hour"] - 1,
        "parts": {"source": _parts(profile), "own": _parts(profile_run(run))},
        "failures": [simulated[one] for one in ("losses", "lost_tokens", "replica_down_s")],
    }


_FIELDS = (
    *("generator.replicas", "generator.max_running_requests", "schedule.staleness"),
    *("schedule.max_overtaking_share", "rollout.groups_per_step", "rollout.group_size"),
    *("rollout.max_turns", "rollout.max_total_tokens", "rollout.sampling.max_tokens_per_turn"),
)


def _config_of(identity: Mapping[str, Any], num_steps: int) -> RunConfig:
    """What the simulation needs of a run's configuration."""
    words = ["--num-steps", f"{num_steps}"]
    for name in _FIELDS:
        if identity.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", f"{identity[name]}"]
    return load_config(Path("alphabet_sort_tiny"), words)


def _read(run: Path) -> tuple[Mapping[str, Any], list[dict[str, Any]], int]:
    """Identity and rows of a run, and how many steps at each end are not steady."""
    recorded = read_recorded(run)
    rows = [row for _, row in sorted(recorded.rows.items())]
    return recorded.identity, rows, int(recorded.identity["schedule.staleness"]) + 1


def _idle_in_traces(run: Path, first: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    """The mean share of the time between two rows in which a replica that was there did not
    decode."""
    start, end = 1e6 * first["wall_time_s"], 1e6 * last["wall_time_s"]
    busy: Counter[str] = Counter()
    for path in run.glob("traces/replica*-rank-0.*.jsonl"):
        name = path.name.partition("-rank-0.")[0].partition("-")[0]
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["name"] == "decode" and event["ph"] == "X":
                until = min(end, event["ts"] + event["dur"])
                busy[name] += max(0.0, until - max(start, event["ts"]))
    gone_s = sum((row["silent_s"] or 0.0) + (row["serve_s"] or 0.0) for row in read_failures(run))
    return 1.0 - busy.total() / (len(busy) * (end - start) - 1e6 * gone_s)


def _slowed(profile: Profile, delay_s: float) -> Profile:
    """The profile with a slower environment: ``delay_s`` more after each turn."""
    groups = tuple(
        tuple(
            replace(
                one,
                environment_s=(
                    one.environment_s[0],
                    *(seconds + delay_s for seconds in one.environment_s[1:]),
                ),
            )
            for one in group
        )
        for group in profile.groups
    )
    return replace(profile, groups=groups)


def _parts(profile: Profile) -> dict[str, float]:
    """The parts of a profile that explain a difference."""
    rollouts = [one for group in profile.groups for one in group]
    tokens = sum(sum(one.sampled_tokens) for one in rollouts)
    return {
        "train_ms_per_token": 1e3 * sum(profile.training.token_s) / len(profile.training.token_s),
        "decode_step_ms": 1e3 * profile.decoding.step_s,
        "decode_request_ms": 1e3 * profile.decoding.request_s,
        "first_token_ms": 1e3 * profile.decoding.first_token_s,
        "environment_s": sum(sum(one.environment_s) for one in rollouts) / len(rollouts),
        "tokens_of_rollout": tokens / len(rollouts),
        "restart_s": profile.losses.restart_s,
    }


def _print(cases: dict[str, dict[str, Any]]) -> None:
    rows = []
    for name, case in cases.items():
        row = [name, Path(case["source"]).name]
        for figure, form in (
            ("steps_per_hour", ",.0f"),
            ("trainer_idle_share", ".0%"),
            ("generator_idle_share", ".0%"),
        ):
            row.append(f"{case['predicted'][figure]:{form}} / {case['measured'][figure]:{form}}")
        rows.append([*row, f"{case['speed_error']:+.0%}"])
    header = ["run", "profile of", "steps/h", "trainer idle", "replicas idle", "error"]
    print_table(header, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--recorded", nargs=3, action="append", default=[], metavar=("RUN", "SOURCE", "DELAY_S")
    )
    parser.add_argument("--wait-s", type=float, default=0.0, help="of each step of an engine")
    parser.add_argument("--learning-rate", type=float, help="of all runs (default: the demo's)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/simulation"))
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/simulation.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
