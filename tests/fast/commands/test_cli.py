from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchtitan_rl.commands.cli import COMMANDS, main
from torchtitan_rl.commands.torchrun import main as launch
from torchtitan_rl.launch.lease import hold_run

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs" / "alphabet_sort_tiny.py")


def test_a_dry_run_prints_a_plan_that_fits_a_screen(tmp_path, capsys):
    assert main(["train", TINY, "--dry-run", "--output-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "replica1: 1 process on",
        "trainer: ",
        "trainer rank: about ",
        "1.1 M parameters",
    ):
        assert words in printed
    assert len(printed.splitlines()) < 26
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_json_is_alone_on_stdout_and_has_every_field(tmp_path, capsys) -> None:
    config = tmp_path / "mine.py"
    config.write_text(f"{Path(TINY).read_text()}\nprint('read')\n")
    options = ["--output-dir", str(tmp_path), "--seed", "7", "--trainer.optimizer.eps", "inf"]
    assert main(["train", str(config), "--dry-run", "--json", *options[:-2]]) == 0
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert shown.err == "read\n"
    assert plan["configuration"]["seed"] == 7
    assert plan["configuration"]["task"]["max_turns"] == 3
    assert [one["name"] for one in plan["processes"]["replicas"]] == ["replica0", "replica1"]
    assert plan["memory_bytes"]["trainer"].keys() >= {"weights", "gradients", "activations"}
    assert main(["train", str(config), "--dry-run", "--json", *options]) == 2
    assert capsys.readouterr().out == ""


def test_plans_of_other_commands_are_json_too(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    any_port = ["--endpoint.port", "0"]
    assert main(["serve", "package:alphabet_sort", "--dry-run", "--json", *any_port]) == 0
    served = json.loads(capsys.readouterr().out)
    assert served["configuration"]["endpoint"]["port"] == 0
    words = ["eval", "package:alphabet_sort", "--config", TINY, "--dry-run", "--json"]
    assert main([*words, "--problems", "3"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert (evaluated["num_problems"], evaluated["options"]["problems"]) == (3, 3)


OUT_OF_BOUNDS = {
    "--seed": "-1",
    "--num-steps": "0",
    "--rollout.step-timeout-s": "inf",
    "--schedule.max-overtaking-share": "nan",
}
WRONG_TOGETHER = {
    "--generator.kv-cache-bytes": "10",
    "--trainer.threads": "1000",
    "--name": "../../x",
}


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (OUT_OF_BOUNDS | WRONG_TOGETHER, OUT_OF_BOUNDS),  # what depends on them is not checked yet
        (WRONG_TOGETHER, WRONG_TOGETHER),
    ],
)
def test_every_error_is_a_line_and_nothing_starts(
    wrong: dict[str, str], shown: dict[str, str], tmp_path: Path, capsys
) -> None:
    words = [word for option in wrong.items() for word in option]
    assert main(["train", TINY, *words, "--output-dir", str(tmp_path)]) == 2
    assert [line.split(" ")[:2] for line in capsys.readouterr().err.splitlines()] == [
        ["error:", option.removeprefix("--").replace("-", "_")] for option in shown
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "one"], "Error parsing --seed: invalid literal for int()"),
        (["--placement", "elsewhere"], "invalid choice 'elsewhere' for argument '--placement'"),
        (["--trainer.optimizer.betas", "0.9"], "'--trainer.optimizer.betas'. Expected 2 values"),
        (["--num-steps"], "Missing value for argument '--num-steps'"),
        (["--num-step", "3"], "Unrecognized options: --num-step, 3 (similar: --num-steps)"),
    ],
)
def test_a_wrong_option_is_one_line_with_exit_code_2(options, message, capsys) -> None:
    assert main(["train", TINY, "--dry-run", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert line.endswith(f"; see torchtitan-rl train {TINY} --help")


CONFIGS = (TINY, str(ROOT / "configs" / "mixture_smollm2.py"))
HELPS = [["serve"], ["generate"], *(["train", config] for config in CONFIGS)]


@pytest.mark.parametrize("command", HELPS, ids=lambda words: Path(words[-1]).name)
def test_every_option_has_a_help_text(command, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # one column of options
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    lines = [line.strip("│| \n") for line in capsys.readouterr().out.splitlines()]
    is_option = re.compile(r"--[a-z][a-z0-9.-]+(, --[a-z0-9.-]+)*( |$)").match
    options = [number for number, line in enumerate(lines) if is_option(line)]
    assert len(options) > 10
    # The text of a mapping is that of its group; its entries have none of their own.
    of_mapping = re.compile(r"--task(\.tasks\.[\w-]+)?\.(tasks|options|weights|kwargs)\.").match
    texts = [[*lines[n].split("  ", 1), lines[n + 1]][1].strip() for n in options]
    bare = [
        lines[n]
        for n, text in zip(options, texts, strict=True)
        if text[0] in "(-+╰" and not of_mapping(lines[n])
    ]
    assert bare == []


@pytest.mark.parametrize("place", ["/proc/no/such", "/dev/null/x", "x" * 5000])
def test_an_output_directory_that_cannot_be_made_is_refused(place, capsys) -> None:
    assert main(["train", TINY, "--dry-run", "--output-dir", place]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: output_dir is {place}: ")


WRONG_COMMANDS = {
    "": "a command is missing: give one of train, sft, dpo, serve, generate, ",
    "trian alphabet_sort_tiny": "'trian' is no command: did you mean train?",
    "--foo": "'--foo' is no command: give one of train, ",
    "train": "CONFIG is missing: ",
    "train --dry-run": "CONFIG is missing: ",
    "train --num-steps 3 alphabet_sort_tiny": "CONFIG is missing: it comes first, ",
    "train alphabet_sort_tiny --schedule.max-rollouts AUTO": "--schedule.max-rollouts is 'AUTO': "
    "give a whole number or auto or all; see ",
    "train alphabet_sort_tiny --json": "--json is of a plan: give --dry-run --json",
    "serve": "MODEL is missing",
    "serve --nosuch": "MODEL is missing",
    "serve a b": "Unrecognized options: b",
    "profile /nonexistent": "RUN_DIR is /nonexistent: it has no readable identity.json",
    "simulate alphabet_sort_tiny": "--profile is missing: ",
    "chaos": "RUN_DIR is missing",
    "chaos /nonexistent": "RUN_DIR is /nonexistent: no run of yours is running in it",
    "generate": "--model, --input, --output are missing",
    "generate --nosuch": "Unrecognized options: --nosuch",
    "eval": "--config is missing",
    "eval a --config alphabet_sort_tiny --nosuch": "Unrecognized options: --nosuch",
    "data": "'data' is no command: did you mean data preview?",
    "data show": "'data show' is no command: did you mean data preview?",
    "data preview": "CONFIG is missing: ",
    "data preview --count 3": "CONFIG is missing: it comes first, ",
    "new": "'new' is no command: did you mean new task?",
    "new task": "NAME is missing",
    "new task --nosuch": "NAME is missing",
    "env chek alphabet_sort_tiny": "'env chek' is no command: did you mean env check?",
    "env check": "CONFIG is missing",
    "env check alphabet_sort_tiny --nosuch": "Unrecognized options: --nosuch",
    "doctor --nosuch": "CONFIG is missing before --nosuch",
    "fit": "CONFIG is missing",
    "fit alphabet_sort_qwen3_0_6b": "--devices is missing: give such as --devices 1x24GB",
    "fit alphabet_sort_qwen3_0_6b --devices 4x8": "--devices is '4x8': give the number of devices",
    "fit alphabet_sort_qwen3_0_6b --devices 1x24GB --nosuch": "Unrecognized options: --nosuch",
    "retriever --nosuch": "Unrecognized options: --nosuch",
    "replay": "RUN_DIR is missing",
    "replay nosuch --step 1": "RUN_DIR is nosuch: it has no readable identity.json",
    "sft": "CONFIG is missing: give a Python file or one of sft_alphabet_sort_tiny",
    "sft alphabet_sort_tiny": "CONFIG is alphabet_sort_tiny: it is for torchtitan-rl train",
    "dpo nosuch.py": "CONFIG is nosuch.py: there is no such file",
    "explain": "RUN_DIR: give the folder of one run",
    "explain a b": "RUN_DIR: give the folder of one run",
    "explain nosuch": "nosuch: no run",
    "scale": "RUN_DIR, --replicas are missing",
    "scale nosuch": "--replicas is missing",
    "scale nosuch --replicas 0": "--replicas is 0: ",
    "scale nosuch --replicas 2": "RUN_DIR is nosuch: no run of this folder runs on this machine",
    "audit": "RUN_DIR: give the folder of one run",
    "audit a b": "RUN_DIR: give the folder of one run",
    "audit --nosuch": "RUN_DIR: give the folder of one run",
    "audit nosuch": "nosuch: no run",
    "worker": "--address is missing",
    "worker --nosuch": "Unrecognized options: --nosuch",
    "view": "RUN_DIR: give the folder of a run",
    "view nowhere": "nowhere: no such folder",
    "report nowhere": "nowhere: no such folder",
    "keys": "--hosts: give the machines of a run",
    "keys foo": "Unrecognized options: foo",
    "launch-script": "KIND is missing: give one of slurm, kubernetes, ssh, docker-compose",
    "launch-script foo alphabet_sort_tiny": "KIND is foo: give one of slurm, ",
    "launch-script slurm": "CONFIG is missing: ",
    "launch-script slurm alphabet_sort_tiny": "--hosts is missing",
}


@pytest.mark.parametrize("command", WRONG_COMMANDS)
def test_a_wrong_command_says_in_one_line_what_is_wrong(command, capsys) -> None:
    assert main(command.split()) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith(f"error: {WRONG_COMMANDS[command]}")
    assert shown.out == ""


def test_every_command_has_a_wrong_call_above_and_is_in_the_help(capsys) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"torchtitan-rl {command} " in shown
        assert any(wrong.startswith(command) for wrong in WRONG_COMMANDS)


def test_the_version_is_one_line_with_those_of_the_libraries(capsys) -> None:
    assert main(["--version"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"torchtitan-rl \d+\.\d+\.\d+ .*torch \d+\..*vllm \d+\.", line)


def test_a_second_run_in_the_folder_of_a_running_one_ends_with_exit_code_2(
    tmp_path, capsys
) -> None:
    words = ["--output-dir", str(tmp_path), "--name", "one", "--checkpoint.resume"]
    with hold_run(tmp_path / "one"):
        assert main(["train", TINY, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: name is one: process ")


def test_the_launcher_refuses_a_group_of_launchers_on_a_node_in_one_line(
    monkeypatch, capsys
) -> None:
    for size, message in {
        "2": "LOCAL_WORLD_SIZE is 2 and WORLD_SIZE 2: start one launcher on each node",
        "many": "WORLD_SIZE is 'many': it must be a whole number",
        "": "WORLD_SIZE is '': it must be a whole number",
    }.items():
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
        assert launch() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {message}")
