"""Trainer and replicas in turns on the same devices, in whole runs from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.real.runs import Run, options, read_metrics

FEW = ("--num-steps", "3", "--evaluation.num-problems", "0")
COLOCATED = ("--placement", "colocated")


def run(root: Path, name: str, *more: str) -> Path:
    """The directory of a small run that ended well and left no process behind."""
    finished = Run(options(root, name, *more), log=root / f"{name}.log")
    assert finished.wait() == 0, finished.log.read_text()[-3000:]
    assert finished.left_behind() == []
    return root / name


def policy_bytes(run_dir: Path) -> bytes:
    return (run_dir / "policy" / "model.safetensors").read_bytes()


def test_trap_26_at_staleness_0_a_colocated_run_trains_what_a_separate_one_does_bit_for_bit(
    tmp_path: Path,
) -> None:
    colocated = run(tmp_path, "colocated", *FEW, *COLOCATED)
    separate = run(tmp_path, "separate", *FEW)
    assert policy_bytes(colocated) == policy_bytes(separate)
    rows = read_metrics(colocated)
    assert all(row["time/switch_s"] > 0 for row in rows if "train/reward_mean" in row)


def test_a_colocated_run_within_a_bound_is_killed_and_goes_on(tmp_path: Path) -> None:
    more = (
        *COLOCATED,
        *("--num-steps", "6", "--schedule.staleness", "1", "--schedule.window", "0.5"),
        *("--evaluation.every", "2", "--checkpoint.every", "1"),
        *("--metrics.rollouts-per-step", "100000"),
    )
    killed = Run(options(tmp_path, "run", *more), log=tmp_path / "killed.log")
    checkpoints = tmp_path / "run" / "checkpoints"
    killed.wait_until(lambda: any(checkpoints.glob("step-*")), "the first checkpoint")
    killed.kill_all()
    killed.wait()
    run_dir = run(tmp_path, "run", *more, "--checkpoint.resume")
    rows = [row for row in read_metrics(run_dir) if "train/reward_mean" in row]
    assert [row["policy/version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["policy/staleness_max"] for row in rows) == 1
    turns, evaluated = [], []
    for line in (run_dir / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        versions = [set(turn["versions"]) for turn in row["turns"]]
        if row["split"] == "train":
            turns += versions
        else:
            evaluated.append((row["version"], versions))
    assert any(len(versions) > 1 for versions in turns)
    assert {version for version, _ in evaluated} == {0, 2, 4, 6}
    for version, versions in evaluated:
        assert all(of_turn == {version} for of_turn in versions)


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_dry_run_says_where_everything_is(tmp_path: Path, placement: str) -> None:
    dry = Run(
        options(tmp_path, "dry", "--dry-run", "--placement", placement), log=tmp_path / "dry.log"
    )
    assert dry.wait() == 0
    assert ("placement: colocated" in dry.log.read_text()) is (placement == "colocated")
