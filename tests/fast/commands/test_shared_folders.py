"""Commands that are started in a folder, or with a temporary folder, that others can write to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real.runs import ROOT
from torchtitan_rl.backends.monarch.hosts import start_command
from torchtitan_rl.commands.launcher import PROGRAM
from torchtitan_rl.commands.worker import incarnation_command

CONFIG = """
from torch._inductor.runtime.cache_dir_utils import cache_dir
raise ValueError(cache_dir())
"""


def bootstrap() -> list[str]:
    command = start_command({})
    return [command.program, *command.args]


@pytest.mark.parametrize(
    "words",
    [bootstrap(), incarnation_command("tcp://127.0.0.1:0"), [*PROGRAM, "--version"]],
    ids=["processes", "worker", "launcher"],
)
def test_a_process_takes_no_module_from_the_folder_it_is_started_in(
    tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "torchtitan_rl.py").write_text("open('taken', 'w')")
    environment = os.environ | {"TORCHTITAN_RL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    subprocess.run(words, cwd=tmp_path, env=environment, check=False, capture_output=True)
    assert not (tmp_path / "taken").exists()


def test_what_torch_compiles_is_not_where_others_can_be_first(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG)
    shared = tmp_path / "tmp"
    shared.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"
    } | {"TMPDIR": str(shared), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "torchtitan_rl.commands.cli", "train", "config.py"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
    )
    assert f"ValueError: {tmp_path}/.cache/torchtitan-rl/torchinductor" in done.stderr
