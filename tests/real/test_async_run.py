"""Asynchronous training from the command line: equality at staleness 0, the bound above it, and
what a kill -9 of the whole run costs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.real.runs import ROOT, TIMEOUT_S, Run, options, read_metrics, require_audit

ALL_ROLLOUTS = ("--metrics.rollouts-per-step", "100000")


def policy_bytes(run_dir: Path) -> bytes:
    return (run_dir / "policy" / "model.safetensors").read_bytes()


def trained_groups(run_dir: Path) -> dict[int, Counter[str]]:
    """By step: how many rollouts of each group were trained."""
    groups: dict[int, Counter[str]] = {}
    for line in (run_dir / "rollouts.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        if row["split"] == "train":
            groups.setdefault(row["step"], Counter())[row["group_id"]] += 1
    return groups


def require_success(run: Run) -> None:
    assert run.wait() == 0, run.log.read_text()[-3000:]
    assert run.left_behind() == []


def test_trap_26_staleness_0_equals_a_plain_loop_bit_for_bit_on_real_vllm(tmp_path: Path) -> None:
    few = ("--num-steps", "3", "--evaluation.num-problems", "0")
    script = ROOT / "tests" / "real" / "plain_loop.py"
    arguments = options(tmp_path, "plain", *few)
    subprocess.run(
        [sys.executable, str(script), *arguments],
        check=True,
        cwd=ROOT,
        env=None,
        timeout=TIMEOUT_S,
    )
    run = Run(options(tmp_path, "controller", *few), log=tmp_path / "controller.log")
    require_success(run)
    assert policy_bytes(tmp_path / "controller") == policy_bytes(tmp_path / "plain")


def test_a_run_within_a_bound_keeps_it_throws_nothing_away_and_evaluates_one_version(
    tmp_path: Path,
) -> None:
    more = ("--num-steps", "6", "--schedule.staleness", "2", "--schedule.window", "0.5")
    run = Run(
        options(tmp_path, "bounded", *more, *ALL_ROLLOUTS, "--evaluation.every", "2"),
        log=tmp_path / "log",
    )
    require_success(run)
    rows = [row for row in read_metrics(tmp_path / "bounded") if "train/reward_mean" in row]
    assert [row["policy/version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["policy/staleness_max"] for row in rows) <= 2
    assert rows[-1]["policy/staleness_max"] > 0
    assert rows[-1]["total/tokens_discarded"] == 0
    for line in (tmp_path / "bounded" / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["split"] == "evaluation":
            versions = {version for turn in row["turns"] for version in turn["versions"]}
            assert versions == {row["version"]}


def test_late_groups_at_staleness_0_are_restarted_under_the_new_weights(tmp_path: Path) -> None:
    more = ("--num-steps", "4", "--evaluation.num-problems", "0", "--schedule.window", "0.5")
    run = Run(options(tmp_path, "late", *more), log=tmp_path / "log")
    require_success(run)
    rows = read_metrics(tmp_path / "late")
    assert all(row["policy/staleness_max"] == 0 for row in rows)
    assert rows[-1]["total/tokens_discarded/restarted"] > 0


def test_aborted_groups_go_on_from_their_tokens_under_the_new_weights(tmp_path: Path) -> None:
    more = ("--num-steps", "5", "--evaluation.num-problems", "0", *ALL_ROLLOUTS)
    schedule = ("--schedule.staleness", "1", "--schedule.window", "0.5")
    run = Run(
        options(tmp_path, "cut", *more, *schedule, "--schedule.in_flight", "aborted"),
        log=tmp_path / "log",
    )
    require_success(run)
    rows = read_metrics(tmp_path / "cut")
    assert max(row["policy/staleness_max"] for row in rows) == 1
    assert rows[-1]["total/tokens_discarded"] == 0
    lines = (tmp_path / "cut" / "rollouts.jsonl").read_text().splitlines()
    turns = [turn for line in lines for turn in json.loads(line)["turns"]]
    assert any(len(set(turn["versions"])) > 1 for turn in turns)


def kill_and_resume(root: Path, after_s: float) -> None:
    """Kill -9 every process at once; then resume, and compare with what must have happened."""
    more = (
        "--num-steps", "6", "--checkpoint.every", "2", "--schedule.staleness", "1", *ALL_ROLLOUTS
    )  # fmt: skip
    run = Run(options(root, "killed", *more), log=root / "killed.log")
    run.wait_until(lambda: len(read_metrics(root / "killed")) >= 1, "the run's beginning")
    time.sleep(after_s)
    run.kill_all()
    run.wait()
    resumed = Run(options(root, "killed", *more, "--checkpoint.resume"), log=root / "resumed.log")
    require_success(resumed)
    require_audit(root / "killed")
    groups = trained_groups(root / "killed")
    assert list(groups) == [1, 2, 3, 4, 5, 6]
    assert all(set(of_step.values()) == {4} and len(of_step) == 4 for of_step in groups.values())
    assert sum(groups.values(), Counter()).total() == 6 * 4 * 4
    assert len({name for of_step in groups.values() for name in of_step}) == 24


def test_trap_28_a_run_that_was_killed_goes_on_and_trains_every_group_once(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, after_s=3.0)


@pytest.mark.soak
@pytest.mark.parametrize("attempt", range(10))
def test_a_run_killed_at_any_moment_goes_on(tmp_path: Path, attempt: int) -> None:
    kill_and_resume(tmp_path, after_s=random.Random(attempt).uniform(0.0, 12.0))
