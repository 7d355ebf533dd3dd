"""A task of one's own, outside of the repository: from `torchtitan-rl new task` to the evaluation
of its checkpoints."""

from __future__ import annotations

import json
import runpy
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.real.runs import Run, read_metrics, read_rollouts, require_audit
from torchtitan_rl.commands import cli

TRAINING = (
    "--num-steps", "2",
    "--generator.replicas", "1",
    "--checkpoint.every", "1",
    "--rollout.groups-per-step", "2",
    "--rollout.group-size", "4",
    "--evaluation.num-problems", "8",
    "--evaluation.samples-per-problem", "2",
    "--trainer.optimizer.learning-rate", "3e-3",  # so that each step can be told from the others
    "--metrics.progress", "plain",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "my_sums"
    assert cli.main(["new", "task", "my_sums", "--folder", str(folder)]) == 0
    return folder / "my_sums.py"


@pytest.fixture(scope="module")
def run_dir(config: Path) -> Path:
    root = config.parent.parent
    arguments = [str(config), *TRAINING, "--output-dir", str(root), "--name", "run"]
    Run(arguments, log=root / "train.log").require_success()
    require_audit(root / "run")
    return root / "run"


def evaluate(config: Path, run_dir: Path, output: Path, *options: str) -> Run:
    words = [str(run_dir), "--config", str(config), "--problems", "8", "--samples", "2"]
    return Run(
        [*words, "--output", str(output), "--progress", "plain", *options],
        log=output.with_suffix(".log"),
        command="eval",
    )


@pytest.fixture(scope="module")
def evaluation(config: Path, run_dir: Path) -> Path:
    output = run_dir.parent / "evaluation"
    evaluate(config, run_dir, output, "--temperatures", "1.0", "0").require_success()
    return output


def results(output: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((output / "results.json").read_text())["results"]
    return rows


def rollouts(output: Path, step: int, temperature: str = "1") -> dict[str, dict[str, Any]]:
    """By id; each is there once."""
    rows = read_rollouts(output / "run" / f"step-00000{step}" / f"temperature-{temperature}")
    found = {row["rollout_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_its_own_test_passes(config: Path) -> None:
    tests = runpy.run_path(str(config.with_name("test_my_sums.py")))
    tests["test_the_environment_makes_no_usual_mistake"]()


@pytest.mark.soak
def test_checkpoints_are_evaluated_as_they_were_while_training(
    run_dir: Path, evaluation: Path
) -> None:
    rows = [row for row in read_metrics(run_dir) if "evaluation/reward_mean" in row]
    found = results(evaluation)
    assert [(row["model"], row["temperature"]) for row in found] == [
        (f"run/step-00000{step}", temperature) for step in (1, 2) for temperature in (1.0, 0.0)
    ]
    (last,) = [row for row in rows if row["step"] == 2]
    same = found[2]
    assert same["reward"]["mean"] == last["evaluation/reward_mean"]
    assert same["reward"]["ci95_low"] == last["evaluation/reward_ci95_low"]
    assert same["pass_at_k"]["2"]["mean"] == last["evaluation/pass_at_k/2"]
    assert same["tokens_mean"] == last["evaluation/response_length_mean"]


@pytest.mark.soak
def test_each_checkpoint_has_the_weights_that_the_run_sampled_with(
    run_dir: Path, evaluation: Path
) -> None:
    sampled = {
        row["rollout_id"]: row["turns"][0]
        for row in read_rollouts(run_dir)
        if (row["step"], row["split"]) == (2, "evaluation")
    }
    assert sampled
    for name, turn in sampled.items():
        before, after = (rollouts(evaluation, step)[name]["turns"][0] for step in (1, 2))
        assert after["token_ids"] == turn["token_ids"]
        assert after["logprobs"] == pytest.approx(turn["logprobs"], abs=1e-5)
        assert before["logprobs"] != pytest.approx(turn["logprobs"], abs=1e-4)


@pytest.mark.soak
def test_every_rollout_is_recorded_once(evaluation: Path) -> None:
    for step in (1, 2):
        for temperature in ("0", "1"):
            found = rollouts(evaluation, step, temperature)
            assert len(found) == 16
            assert {row["step"] for row in found.values()} == {step}
    assert (evaluation / "results.png").is_file()


@pytest.mark.soak
def test_what_is_finished_is_not_run_again(config: Path, run_dir: Path, evaluation: Path) -> None:
    before = results(evaluation)
    again = evaluate(config, run_dir, evaluation, "--temperatures", "1.0", "0")
    again.require_success()
    text = again.log.read_text()
    assert "64 of 64 rollouts are in" in text
    assert "run/step-000002" in text
    assert results(evaluation) == before


@pytest.mark.soak
def test_a_killed_evaluation_continues(config: Path, run_dir: Path, evaluation: Path) -> None:
    output = run_dir.parent / "killed"
    shutil.rmtree(output, ignore_errors=True)
    options = ("--temperatures", "1.0", "0", "--max-rollouts", "2")
    killed = evaluate(config, run_dir, output, *options)
    file = output / "run" / "step-000001" / "temperature-1" / "rollouts.jsonl"
    killed.wait_until(lambda: file.exists() and file.stat().st_size > 0, "a rollout")
    killed.process.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert killed.left_behind() == []
    continued = evaluate(config, run_dir, output, *options)
    continued.require_success()
    assert " of 64 rollouts are in" in continued.log.read_text()
    assert results(output) == results(evaluation)


@pytest.mark.soak
def test_a_checkpoint_that_is_removed_meanwhile_is_one_error(config: Path, run_dir: Path) -> None:
    copied, output = run_dir.parent / "copy" / "run", run_dir.parent / "removed"
    shutil.copytree(run_dir, copied)
    evaluation = evaluate(config, copied, output, "--max-rollouts", "2")
    file = output / "run" / "step-000001" / "temperature-1" / "rollouts.jsonl"
    evaluation.wait_until(lambda: file.exists() and file.stat().st_size > 0, "a rollout")
    shutil.rmtree(copied / "checkpoints" / "step-000002")
    assert evaluation.wait() == 1
    (error,) = [line for line in evaluation.log.read_text().splitlines() if "error" in line.lower()]
    assert error.startswith("error: ModelLostError: run/step-000002 cannot be evaluated any more: ")
    assert [row["model"] for row in results(output)] == ["run/step-000001"]
    again = evaluate(config, copied, output, "--max-rollouts", "2")
    again.require_success()
    assert "16 of 16 rollouts are in" in again.log.read_text()
