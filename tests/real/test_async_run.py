"""Asynchronous training from the command line: equality at staleness 0, the bound above it, and
what a kill -9 of the whole run costs."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.real.conftest import NUM_STEPS
from tests.real.runs import (
    ONE_REPLICA,
    Run,
    options,
    read_metrics,
    read_rollouts,
    require_audit,
    run_module,
    train,
    weights,
)


@pytest.mark.soak
def test_trap_26_staleness_0_equals_a_plain_loop_bit_for_bit_on_real_vllm(
    tmp_path: Path, whole: Path
) -> None:
    """A plain loop with one replica, which does not evaluate either."""
    arguments = options(tmp_path, "plain", "--num-steps", str(NUM_STEPS), *ONE_REPLICA)
    run_module("tests.real.plain_loop", *arguments)
    assert weights(tmp_path / "plain") == weights(whole)


MINE = """
from dataclasses import replace

from my_scale import SCALE
from torchtitan_rl import policy_loss


def loss(tokens, *, totals, config):
    output = policy_loss(tokens, totals=totals, config=config)
    return replace(output, sums={**output.sums, "own/trained": tokens.trained_T.sum().float()})


def advantage(values, rollouts):
    return [SCALE * (value - min(values)) for value in values]
"""


@pytest.mark.soak
def test_trap_26_credit_by_turn_updates_and_functions_of_ones_own_equal_a_plain_loop_bit_for_bit(
    tmp_path: Path,
) -> None:
    """At staleness 0. The trainer's process loads the file, and its neighbour, from the
    controller's path."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "my_scale.py").write_text("SCALE = 0.5\n")
    more = (
        *("--num-steps", "2", "--rollout.credit", "turn", "--rollout.turn-discount", "0.9"),
        *(
            "--trainer.updates-per-batch",
            "2",
            "--trainer.loss.function",
            f"{tmp_path}/mine.py:loss",
        ),
        *("--rollout.advantage", f"{tmp_path}/mine.py:advantage"),
    )
    run_module("tests.real.plain_loop", *options(tmp_path, "plain", *more, *ONE_REPLICA))
    run_dir = train(tmp_path, "run", *more, *ONE_REPLICA)
    require_audit(run_dir)
    assert weights(run_dir) == weights(tmp_path / "plain")
    rows = [row for row in read_metrics(run_dir) if "trainer/loss" in row]
    assert [row["policy/version"] for row in rows] == [1, 2]
    assert all(row["trainer/updates"] == 2.0 for row in rows)
    assert all(row["trainer/own/trained"] == 1.0 for row in rows)


@pytest.mark.soak
def test_late_groups_at_staleness_0_are_restarted_under_the_new_weights(tmp_path: Path) -> None:
    """As benchmarks.long_tail shows of "over-admit restart", with a real trainer."""
    more = (
        "--num-steps",
        "4",
        "--evaluation.num-problems",
        "0",
        "--schedule.max-overtaking-share",
        "0.5",
    )
    rows = read_metrics(train(tmp_path, "late", *more))
    assert all(row["policy/staleness_max"] == 0 for row in rows)
    assert rows[-1]["total/tokens_discarded/restarted"] > 0


def kill_and_resume(root: Path, after_s: float, *schedule: str) -> Path:
    """Kill -9 every process at once; then resume, and compare with what must have happened."""
    more = (
        *("--num-steps", "6", "--checkpoint.every", "2", "--evaluation.every", "2"),
        *("--schedule.staleness", "2", "--schedule.max-overtaking-share", "0.5", *schedule),
        *("--metrics.rollouts-per-step", "100000"),
    )
    killed = options(root, "run", *more, *ONE_REPLICA)
    run, run_dir = Run(killed, log=root / "killed.log"), root / "run"
    run.wait_until(lambda: len(read_metrics(run_dir)) >= 1, "the run's beginning")
    time.sleep(after_s)
    run.kill_all()
    run.wait()
    train(root, "run", *more, "--checkpoint.resume")
    require_audit(run_dir)
    rows = [row for row in read_metrics(run_dir) if "train/reward_mean" in row]
    assert [row["policy/version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["policy/staleness_max"] for row in rows) <= 2
    assert rows[-1]["policy/staleness_max"] > 0
    assert rows[-1]["total/groups_discarded"] == 0
    groups: dict[int, Counter[str]] = {}  # by step: rollouts of each group
    for rollout in read_rollouts(run_dir):
        if rollout["split"] == "train":
            groups.setdefault(rollout["step"], Counter())[rollout["group_id"]] += 1
        else:  # evaluated under one version
            versions = {version for turn in rollout["turns"] for version in turn["versions"]}
            assert versions == {rollout["version"]}
    assert list(groups) == [1, 2, 3, 4, 5, 6]
    assert all(set(of_step.values()) == {4} and len(of_step) == 4 for of_step in groups.values())
    assert len({name for of_step in groups.values() for name in of_step}) == 24
    return run_dir


@pytest.mark.soak
def test_trap_28_a_killed_run_keeps_its_bound_evaluates_one_version_and_trains_every_group_once(
    tmp_path: Path,
) -> None:
    """Its requests are aborted before each pull and go on from their tokens under new weights; what
    is discarded was sampled under versions after the checkpoint. What the sampler kept goes with
    the tokens all the way: at age 0 the trainer's distribution is the engine's."""
    truncated = ("--rollout.sampling.top-p", "0.95", "--rollout.sampling.top-k", "40")
    run_dir = kill_and_resume(tmp_path, 3.0, "--schedule.during-training", "pause", *truncated)
    rows = [row for row in read_metrics(run_dir) if "trainer/cut_share" in row]
    assert all(row["trainer/cut_share"] == 1.0 for row in rows)
    on_policy = [row["trainer/age_0/ratio_max"] for row in rows if "trainer/age_0/tokens" in row]
    assert on_policy == pytest.approx([1.0] * len(on_policy), abs=1e-4)
    last = read_metrics(run_dir)[-1]
    rolled_back = last.get("total/tokens_discarded/rolled_back", 0)
    assert last["total/tokens_discarded"] == rolled_back
    turns = [turn for rollout in read_rollouts(run_dir) for turn in rollout["turns"]]
    assert any(len(set(turn["versions"])) > 1 for turn in turns)


@pytest.mark.soak
@pytest.mark.parametrize("attempt", range(10))
def test_a_run_killed_at_any_moment_goes_on(tmp_path: Path, attempt: int) -> None:
    mode = "continue" if attempt % 2 else "pause"
    after_s = random.Random(attempt).uniform(0.0, 12.0)
    kill_and_resume(tmp_path, after_s, "--schedule.during-training", mode)
