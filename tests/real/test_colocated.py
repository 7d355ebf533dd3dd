"""Trainer and replicas take turns on the same devices, in whole runs from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.conftest import NUM_STEPS
from tests.real.runs import (
    ONE_REPLICA,
    Run,
    digests,
    options,
    read_metrics,
    read_rollouts,
    train,
    weights,
)
from torchtitan_rl.commands import cli

COLOCATED = ("--placement", "colocated")


def test_trap_26_at_staleness_0_a_colocated_run_trains_what_a_separate_one_does_bit_for_bit(
    tmp_path: Path, whole: Path
) -> None:
    few = ("--num-steps", str(NUM_STEPS), "--evaluation.num-problems", "0")
    colocated = train(tmp_path, "colocated", *few, *COLOCATED, *ONE_REPLICA)
    assert digests(colocated) == digests(whole)
    assert weights(colocated) == weights(whole)
    rows = read_metrics(colocated)
    assert all(row["time/switch_s"] > 0 for row in rows if "train/reward_mean" in row)


@pytest.mark.soak
def test_a_colocated_run_within_a_bound_is_killed_and_goes_on(tmp_path: Path) -> None:
    more = (
        *(*COLOCATED, *ONE_REPLICA),
        *(
            "--num-steps",
            "6",
            "--schedule.staleness",
            "1",
            "--schedule.max-overtaking-share",
            "0.5",
        ),
        *("--evaluation.every", "2", "--checkpoint.every", "1"),
        *("--metrics.rollouts-per-step", "100000"),
    )
    killed = Run(options(tmp_path, "run", *more), log=tmp_path / "killed.log")
    checkpoints = tmp_path / "run" / "checkpoints"
    killed.wait_until(lambda: any(checkpoints.glob("step-*")), "the first checkpoint")
    killed.kill_all()
    killed.wait()
    run_dir = train(tmp_path, "run", *more, "--checkpoint.resume")
    rows = [row for row in read_metrics(run_dir) if "train/reward_mean" in row]
    assert [row["policy/version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["policy/staleness_max"] for row in rows) == 1
    turns, evaluated = [], []
    for rollout in read_rollouts(run_dir):
        versions = [set(turn["versions"]) for turn in rollout["turns"]]
        if rollout["split"] == "train":
            turns += versions
        else:
            evaluated.append((rollout["version"], versions))
    assert any(len(versions) > 1 for versions in turns)
    assert {version for version, _ in evaluated} == {0, 2, 4, 6}
    for version, versions in evaluated:
        assert all(of_turn == {version} for of_turn in versions)


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_dry_run_says_where_everything_is(
    tmp_path: Path, placement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = options(tmp_path, "dry", "--dry-run", "--placement", placement)
    assert cli.main(["train", *arguments]) == 0
    assert ("placement: colocated" in capsys.readouterr().out) is (placement == "colocated")
