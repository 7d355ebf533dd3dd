from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_rl.cli import main

TINY = str(Path(__file__).parents[2] / "configs" / "alphabet_sort_tiny.py")


def test_a_dry_run_prints_the_configuration_and_the_processes(tmp_path, capsys):
    assert main(["train", TINY, "--dry-run", "--output-dir", str(tmp_path), "--seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert "seed=7" in printed
    assert "replica1: 1 process on" in printed
    assert list(tmp_path.iterdir()) == []


def test_every_mistake_is_printed_and_nothing_starts(tmp_path, capsys):
    options = ["--rollout.group-size", "1", "--rollout.sampling.top-p", "0.5"]
    assert main(["train", TINY, "--output-dir", str(tmp_path), *options]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(" is ")[0] for line in errors] == [
        "error: rollout.group_size",
        "error: rollout.sampling.top_p",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["train"], ["trian", TINY]])
def test_a_wrong_command_prints_the_usage(words, capsys):
    assert main(words) == 2
    assert "usage: torchtitan-rl train CONFIG" in capsys.readouterr().err
