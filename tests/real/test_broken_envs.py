"""Environments that hang, raise, return garbage or are always solved, in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.broken_envs import FORGED
from tests.real.runs import ROOT, Run, read_metrics, read_rollouts
from torchtitan_rl.rollout.rendering import load_tokenizer

CONFIG = ROOT / "tests" / "real" / "broken_envs.py"


def start(root: Path, *options: str) -> Run:
    place = ("--output-dir", str(root), "--name", "run", "--metrics.progress", "plain")
    return Run([str(CONFIG), *place, *options], log=root / "log")


@pytest.mark.soak
def test_a_run_goes_on_alongside_environments_that_hang_raise_or_return_garbage(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, "--schedule.staleness", "1", "--metrics.rollouts-per-step", "24")
    run.require_success()
    rows = [row for row in read_metrics(tmp_path / "run") if "train/reward_mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["train/ended_completed"] == 12  # fine, solved and forges
        assert row["train/ended_step_timeout"] == 4
        assert row["train/ended_env_error"] == 8  # raises and garbage
        assert row["tokens/discarded/step_timeout"] > 0
        assert row["tokens/discarded/env_error"] > 0
    require_forged_turns_are_text(tmp_path / "run")


def require_forged_turns_are_text(run_dir: Path) -> None:
    tokenizer = load_tokenizer(run_dir / "policy")
    expected = "\n<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n"
    expected += "<|im_start|>assistant\n"
    turns = [row["turns"] for row in read_rollouts(run_dir) if "forges" in row["problem_id"]]
    assert len(turns) == 8
    for first, second in turns:
        num_before = len(first["prompt_token_ids"]) + len(first["token_ids"])
        reply = second["prompt_token_ids"][num_before:]
        assert FORGED in tokenizer.decode(reply)
        added = tokenizer.added_tokens_decoder
        found, harmless = (
            [one for one in ids if one in added]
            for ids in (reply, tokenizer.encode(expected, add_special_tokens=False))
        )
        assert found[-len(harmless) :] == harmless
        assert len(found) <= len(harmless) + 1  # the end of a turn that was cut


@pytest.mark.soak
def test_a_run_whose_prompts_are_outside_of_the_vocabulary_says_so_and_fails(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, "--task.kinds", "outside")
    assert run.wait() == 1
    said = run.log.read_text()
    assert "24 of 24 rollouts failed: generation_error: e0/outside-" in said
    assert "holds 1000000, outside the vocabulary" in said
    assert "error: NothingTrainedError: all rollouts of the first two steps failed" in said
    assert "48 of 48 rollouts failed" in said
    assert "(48x)" in said
    assert run.left_behind() == []


@pytest.mark.soak
def test_a_run_that_trained_nothing_says_so_when_it_is_resumed(tmp_path: Path) -> None:
    assert start(tmp_path, "--task.kinds", "outside").wait() == 1
    again = start(tmp_path, "--task.kinds", "outside", "--checkpoint.resume")
    assert again.wait() == 1
    said = again.log.read_text()
    assert "error: NothingTrainedError: no step of the run had a token to train on" in said
    more = start(tmp_path, "--task.kinds", "outside", "--checkpoint.resume", "--num-steps", "9")
    assert more.wait() == 1
    assert "failed after step 7 of 9" in more.log.read_text()


@pytest.mark.soak
def test_trap_19_a_run_whose_problems_are_all_solved_ends_with_a_message_where_they_are_skipped(
    tmp_path: Path,
) -> None:
    """As tests/fast/orchestration/test_controller.py shows with simulated parts."""
    run = start(tmp_path, "--task.kinds", "solved", "--schedule.zero-variance", "skip")
    assert run.wait() == 1
    assert "rewards that do not differ" in run.log.read_text()
    assert run.left_behind() == []
