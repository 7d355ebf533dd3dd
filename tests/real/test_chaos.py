"""``torchtitan-rl chaos`` on whole runs that are started again when their controller is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.real.runs import ROOT, Run, options, read_metrics
from torchtitan_rl.commands.chaos import find_controller
from torchtitan_rl.observability.failures import read_failures

STOPPED = 128 + signal.SIGTERM


def run_with_chaos(train: list[str], run_dir: Path, *chaos: str, log: Path) -> str:
    """Disturb a run, stop it by SIGTERM after the last fault unless it has ended, and require a
    clean audit. Returns what ``chaos`` printed."""
    runs = [Run(train, log=log)]
    runs[0].wait_until(lambda: len(read_metrics(run_dir)) >= 2, "the first step")
    command = [sys.executable, "-m", "torchtitan_rl.commands.cli", "chaos", str(run_dir), *chaos]
    printed = log.with_name("chaos")
    with printed.open("w") as output:
        disturbing = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    stopped = None
    while disturbing.poll() is None:
        time.sleep(0.2)
        if runs[-1].process.poll() not in (None, 0, STOPPED):
            runs.append(Run(train, log=log.with_name(f"log{len(runs)}")))
        elif stopped is None and "waiting for the end" in printed.read_text():
            stopped = find_controller(run_dir)
            if stopped is not None:
                stopped.terminate()
    said = printed.read_text()
    print(said)
    assert disturbing.returncode == 0, said
    assert runs[-1].wait() in (0, STOPPED)
    for run in runs:
        assert run.left_behind() == []
    return said


def test_a_run_goes_on_without_what_was_killed(tmp_path):
    train = options(tmp_path, "run", "--num-steps", "100000", "--schedule.staleness", "1")
    train += ["--checkpoint.every", "3", "--checkpoint.resume"]
    parts = ("replica", "trainer", "controller")
    said = run_with_chaos(
        train, tmp_path / "run", "--every", "1s", "--kinds", "kill", "--times", "3",
        "--parts", *parts, log=tmp_path / "log",
    )  # fmt: skip
    for part in parts:
        assert f" kill {part}" in said
    assert "controller ended 1 times" in said
    steps = [row["step"] for row in read_metrics(tmp_path / "run")]
    assert steps == [*range(len(steps))]


@pytest.mark.soak
def test_agents_go_on_through_45_faults_of_all_parts(tmp_path):
    """20 faults of replicas, 10 of the trainer, 5 of the endpoint and 10 of the controller."""
    train = [
        str(ROOT / "configs" / "calculator_agent_tiny.py"),
        "--output-dir", str(tmp_path), "--name", "run", "--metrics.progress", "plain",
        "--rollout.groups-per-step", "8", "--rollout.group-size", "4",
        "--evaluation.every", "0", "--evaluation.num-problems", "16",
        "--generator.replicas", "3", "--trainer.data-parallel-shard", "2",
        "--schedule.staleness", "1", "--num-steps", "100000",
        "--checkpoint.every", "5", "--checkpoint.resume",
    ]  # fmt: skip
    parts = ["replica"] * 4 + ["trainer"] * 2 + ["endpoint"] + ["controller"] * 2
    said = run_with_chaos(
        train, tmp_path / "run", "--every", "10s", "--kinds", "kill", "stop", "slow",
        "--times", "45", "--parts", *parts, "--restart-s", "60", log=tmp_path / "log",
    )  # fmt: skip
    assert "45 faults" in said
    assert len(read_failures(tmp_path / "run")) > 10
    steps = [row["step"] for row in read_metrics(tmp_path / "run")]
    assert steps == [*range(len(steps))]
    assert len(steps) > 60
