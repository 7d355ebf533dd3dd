"""``torchtitan-rl chaos`` on whole runs that are started again when their controller ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.real.runs import ROOT, TIMEOUT_S, Run, options, read_metrics
from torchtitan_rl.commands.chaos import find_controller
from torchtitan_rl.observability.failures import read_failures


def run_with_chaos(train: list[str], run_dir: Path, *chaos: str, log: Path) -> str:
    """Run ``train`` to its end while it is disturbed, and require a clean audit. Returns what
    ``chaos`` printed."""
    runs = [Run(train, log=log)]
    runs[0].wait_until(lambda: len(read_metrics(run_dir)) >= 2, "the first step")
    command = [sys.executable, "-m", "torchtitan_rl.commands.cli", "chaos", str(run_dir), *chaos]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as disturbing:
        while disturbing.poll() is None or find_controller(run_dir) is not None:
            time.sleep(0.2)
            if runs[-1].process.poll():
                runs.append(Run(train, log=log.with_name(f"log{len(runs)}")))
        said = disturbing.stdout.read()
    print(said)
    assert disturbing.returncode == 0, said
    assert runs[-1].wait(TIMEOUT_S) == 0
    for run in runs:
        assert run.left_behind() == []
    return said


def test_a_run_ends_as_if_nothing_had_happened(tmp_path):
    train = options(tmp_path, "run", "--num-steps", "8", "--schedule.staleness", "1")
    train += ["--checkpoint.every", "3", "--checkpoint.resume"]
    parts = ("replica", "trainer", "controller")
    said = run_with_chaos(
        train, tmp_path / "run", "--every", "1s", "--kinds", "kill", "--times", "3",
        "--parts", *parts, log=tmp_path / "log",
    )  # fmt: skip
    for part in parts:
        assert f" kill {part}" in said
    assert "controller ended 1 times" in said
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [*range(9)]


@pytest.mark.soak
def test_agents_go_on_through_45_faults_of_all_parts(tmp_path):
    """Done line 1 of issue 30: 20 faults of replicas, 10 of the trainer, 5 of the endpoint and 10
    of the controller."""
    train = [
        str(ROOT / "configs" / "calculator_agent_tiny.py"),
        "--output-dir", str(tmp_path), "--name", "run", "--metrics.progress", "plain",
        "--rollout.groups-per-step", "8", "--rollout.group-size", "4",
        "--evaluation.every", "0", "--evaluation.num-problems", "16",
        "--generator.replicas", "3", "--trainer.data-parallel-shard", "2",
        "--schedule.staleness", "1", "--num-steps", "60",
        "--checkpoint.every", "5", "--checkpoint.resume",
    ]  # fmt: skip
    parts = ["replica"] * 4 + ["trainer"] * 2 + ["endpoint"] + ["controller"] * 2
    said = run_with_chaos(
        train, tmp_path / "run", "--every", "10s", "--kinds", "kill", "stop", "slow",
        "--times", "45", "--parts", *parts, log=tmp_path / "log",
    )  # fmt: skip
    assert "45 faults" in said
    assert len(read_failures(tmp_path / "run")) > 10
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [*range(61)]
