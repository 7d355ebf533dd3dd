"""The task in one file that the README shows, pasted into a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fast.rollout.test_example_env import BLOCKS
from torchtitan_rl.commands import cli

(SOURCE,) = (block for block in BLOCKS if "RunConfig(" in block)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "sums.py"
    path.write_text(SOURCE)
    return str(path)


def test_it_has_at_most_thirty_lines() -> None:
    assert len([line for line in SOURCE.splitlines() if line.strip()]) <= 30


def test_it_can_be_trained(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", config, "--dry-run"]) == 0
    assert "start: step 1" in capsys.readouterr().out


def test_its_environment_makes_no_usual_mistake(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["env", "check", config, "--say", "3", "--max-block-ms", "60000"]) == 0
    shown = capsys.readouterr().out
    assert "completed, reward -0.5, 2 turns, 1 episode" in shown
    assert "note" not in shown
