"""A run that records everything is computed again: one step, or all of them, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real.runs import (
    ONE_REPLICA,
    Run,
    digests,
    read_rollouts,
    require_audit,
    train,
    weights,
)

RECORDED = (*ONE_REPLICA, "--metrics.rollouts-per-step", "all", "--checkpoint.every", "3")
STALE = ("--schedule.staleness", "1", "--rollout.sampling.top-p", "0.9")


def replay(root: Path, run_dir: Path, *words: str) -> tuple[int, str]:
    output = root / "said"
    run = Run([str(run_dir), *words], command="replay", log=root / "replay.log", output=output)
    exit_code = run.wait()
    assert run.left_behind() == []
    return exit_code, output.read_text() + (root / "replay.log").read_text()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Asynchronous, and with sets of kept tokens."""
    root = tmp_path_factory.mktemp("recorded")
    return train(root, "whole", *RECORDED, *STALE, "--num-steps", "6")


@pytest.mark.soak
def test_step_5_is_replayed_bit_for_bit_and_another_loss_is_not(
    recorded: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tokens.jsonl"
    words = ("--step", "5", "--out", str(out), "--trainer.loss.clip-high", "0.001")
    exit_code, said = replay(tmp_path, recorded, *words)
    assert exit_code == 0, said
    assert "from the checkpoint of step 3" in said
    assert said.count("the weights equal those of the run") == 2  # steps 4 and 5
    table = {words[0]: words[1:] for line in said.splitlines() if len(words := line.split()) == 4}
    assert table["loss"][0] == table["loss"][1] != table["loss"][2]
    assert table["clip_share"][1] != table["clip_share"][2]
    tokens = [json.loads(line) for line in out.read_text().splitlines()]
    trained = [token for token in tokens if token["mask"]]
    assert sum(token["loss"] for token in trained) == pytest.approx(
        float(table["loss"][1]), rel=1e-3, abs=1e-6
    )
    logged = {
        row["rollout_id"]: [one for turn in row["turns"] for one in turn["trainer_logprobs"] or ()]
        for row in read_rollouts(recorded)
        if row["step"] == 5 and row["split"] == "train"
    }
    by_rollout: dict[str, list[Any]] = {}
    for token in tokens:
        by_rollout.setdefault(token["rollout_id"], []).append(token["trainer_logprob"])
    assert by_rollout == {name: logprobs for name, logprobs in logged.items() if logprobs}


@pytest.mark.soak
def test_the_first_step_is_replayed_from_the_initial_policy(recorded: Path, tmp_path: Path) -> None:
    exit_code, said = replay(tmp_path, recorded, "--step", "1")
    assert exit_code == 0, said
    assert "from the initial policy" in said


@pytest.mark.soak
def test_training_on_recorded_rollouts_gives_the_weights_of_the_run(
    recorded: Path, tmp_path: Path
) -> None:
    words = ("--mode", "train", "--rollouts", str(recorded), "--num-steps", "6")
    again = train(tmp_path, "again", *RECORDED, *STALE, *words)
    assert digests(again) == digests(recorded)
    assert weights(again) == weights(recorded)
    exit_code, said = replay(tmp_path, again, "--step", "2")
    assert exit_code == 0, said


@pytest.mark.soak
def test_a_run_that_only_generates_records_rollouts_to_train_on(tmp_path: Path) -> None:
    made = train(tmp_path, "made", *ONE_REPLICA, "--mode", "generate", "--num-steps", "2")
    assert len([row for row in read_rollouts(made) if row["split"] == "train"]) == 2 * 16
    assert not (made / "policy").exists()
    resumed = ("--mode", "generate", "--num-steps", "3", "--checkpoint.resume")
    train(tmp_path, "made", *ONE_REPLICA, *resumed)
    words = ("--mode", "train", "--rollouts", str(made), "--num-steps", "3")
    trained = train(tmp_path, "trained", *ONE_REPLICA, *words)
    assert len(set(digests(trained))) == 3
    require_audit(made)
    require_audit(trained)
