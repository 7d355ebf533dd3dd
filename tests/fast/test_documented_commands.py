"""The commands that the pages show run as they are, in a folder with the pages' example files. What
would start processes is only planned (``--dry-run``); what cannot run here is in `NOT_RUN`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.support.conversations import examples_file
from tests.support.documentation import (
    PAGES,
    PLACEHOLDERS,
    ROOT,
    Command,
    commands,
    write_example_files,
)
from tests.support.verifiers import needs_verifiers
from torchtitan_rl.commands.cli import COMMANDS, main
from torchtitan_rl.config import vllm_options
from torchtitan_rl.config.lora import LoraConfig, adapter_shapes, write_adapter
from torchtitan_rl.config.model import read_architecture, resolve_checkpoint
from torchtitan_rl.experiments import alphabet_sort, gsm8k
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.experiments.gsm8k.make_file import MakeFile
from torchtitan_rl.experiments.gsm8k.make_file import main as make_file

PLANNED = ("train", "sft", "dpo", "serve", "eval")  # have --dry-run
RUN = ("data", "doctor", "env", "fit", "keys", "launch-script", "new")
NOT_RUN = {
    r"torchrun ": "starts a run or an engine: tests/real/hosts/test_launchers.py, "
    "tests/real/test_generate_cli.py",
    r"torchtitan-rl chaos ": "disturbs a running run: tests/real/test_chaos.py",
    r"torchtitan-rl view ": "serves until it is stopped: tests/fast/page/test_security.py",
    r"torchtitan-rl report ": "needs a run's files: tests/fast/page/test_report.py",
    r"torchtitan-rl worker ": "listens until it is stopped: tests/real/test_tls_workers.py",
    r"torchtitan-rl train .*--launch\.(attach|job)": "needs workers: tests/real/hosts",
    r"torchtitan-rl (audit|explain|report|view) ": "needs a run's files: "
    "tests/real/test_main_job.py, tests/real/test_explain.py",
    r"torchtitan-rl scale ": "needs a run that runs: tests/real/test_scaling.py",
    r"torchtitan-rl (profile|simulate) ": "needs a run's files: tests/fast/simulation",
    r"torchtitan-rl (replay |train .*--mode train)": (
        "needs a recorded run: tests/real/test_replay.py"
    ),
    r"torchtitan-rl generate ": "starts an engine: tests/real/test_generate_cli.py",
    r"torchtitan-rl env check .*--policy real": "starts an engine: tests/real/test_new_task.py",
    r"(torchtitan-rl data preview|python) lake_": "needs a server: "
    "tests/real/test_openenv_server.py",
    r"torchtitan-rl eval .*my_sums": "needs a run's checkpoints: tests/real/test_new_task.py",
    r"make |source ": "sets up: CI runs it, except for `make demo` (tests/real/test_main_job.py)",
    r"python -m torchtitan_rl\.experiments\.\S+warm_start": "trains for minutes; the "
    "policies that it made are in the package",
    r"torchtitan-rl train \S+pictures/": "needs torchvision: tests/real/test_images.py",
    r"python -m benchmarks": "takes an hour: tests/real/test_benchmarks.py",
    r"hf |torchtitan-rl train gsm8k_smollm2": "needs the network: tests/real/test_data_tasks.py",
    r"torchtitan-rl retriever ": "serves: tests/fast/commands/test_retriever.py",
    r"(sbatch|kubectl|docker|bash run\.sh)": "needs a cluster or a builder: tests/fast/launch",
    r"lsof |\.venv/bin/py-spy ": "needs a running run",
    r"(\w+=\w+ )?\.venv/bin/python -m (tests|pytest)": "runs tests",
    r"(URL|KEY|LEASE|SESSION)=|field\(\)|curl |-H ": "one script: tests/fast/test_client.py",
    r"cat ": "shows a file of the example",
}
"""Why commands that match a pattern are not run here; all else that a page shows is."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what the pages take for granted."""
    monkeypatch.chdir(tmp_path)
    # It imports vLLM: tests/real/test_vllm_options.py takes the pages' options.
    monkeypatch.setattr(vllm_options, "_field_errors", lambda options: [])
    for page in ("README.md", *(page for page in PAGES if "tutorials" in page)):
        write_example_files(page, tmp_path)
    (tmp_path / "my_config.py").write_text((tmp_path / "sums.py").read_text())
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "Qwen3-0.6B").symlink_to(gsm8k.__path__[0] + "/policy")
    (tmp_path / "outputs" / "RUN").mkdir(parents=True)
    (tmp_path / "outputs" / "RUN" / "policy").symlink_to(gsm8k.__path__[0] + "/policy")
    (tmp_path / "outputs" / "RUN" / "adapter").mkdir()
    lora = LoraConfig(rank=4)
    shapes = adapter_shapes(read_architecture(resolve_checkpoint(PLACEHOLDERS["DIR"])), lora)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    write_adapter(tmp_path / "outputs" / "RUN" / "adapter", lora, tensors, base="base")
    (tmp_path / "outputs" / "sft_alphabet_sort_tiny").mkdir()
    policy = alphabet_sort.__path__[0] + "/policy"
    (tmp_path / "outputs" / "sft_alphabet_sort_tiny" / "policy").symlink_to(policy)
    (tmp_path / "outputs" / "alphabet_sort_tiny").mkdir()
    (tmp_path / "outputs" / "alphabet_sort_tiny" / "policy").symlink_to(POLICY_DIR)
    make_file(MakeFile(output=tmp_path / "data" / "train.jsonl"))
    rows = ({"question": f"{n} + 1?", "solution": str(n + 1), "level": 1} for n in range(2000))
    for name in ("conversations", "held_out"):
        examples_file(tmp_path / "data" / f"{name}.jsonl")
    (tmp_path / "data" / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def run(command: Command) -> int:
    """The exit code."""
    words = command.words
    if words[0] == "python":
        return subprocess.run([sys.executable, *words[1:]], check=False).returncode
    assert words[1] in (*PLANNED, *RUN), "give in RUN or NOT_RUN whether this command runs here"
    if words[1] in PLANNED and not {"--dry-run", "--help"} & {*words}:
        words.append("--dry-run")
    if words[1] == "keys":
        shutil.rmtree("keys", ignore_errors=True)
    if words[1:3] == ["env", "check"]:
        words += ["--max-block-ms", "60000"]  # this machine may do other work
    with suppress(SystemExit):  # of --help
        return main(words[1:])
    return 0


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_run(
    page: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_example_files(page, folder)
    tried = [
        command
        for command in commands(page)
        if not any(re.match(pattern, command.text) for pattern in NOT_RUN)
        and not ("verifiers_tiny" in command.text and needs_verifiers.args[0])
    ]
    for command in sorted(tried, key=lambda command: " new task " not in command.text):
        code, error = run(command), capsys.readouterr().err
        assert bool(code) == bool(command.error), f"{command.text}: {error}"
        assert command.error in error, command.text


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_a_sentence_exist(page: str) -> None:
    named = re.findall(r"`torchtitan-rl ([^`\n]+)`", (ROOT / page).read_text())
    known = (*COMMANDS, "new", "env", "data", "-", "VERB")
    assert [words for words in named if not words.startswith(known)] == []


def test_each_reason_not_to_run_a_command_is_needed() -> None:
    texts = [command.text for page in PAGES for command in commands(page)]
    unused = [pattern for pattern in NOT_RUN if not any(re.match(pattern, t) for t in texts)]
    assert unused == []
    named = re.findall(r"tests/[\w/]+(?:\.py)?", " ".join(NOT_RUN.values()))
    assert [name for name in named if not (ROOT / name).exists()] == []
