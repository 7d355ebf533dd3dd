from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_rl.config.run_lock import hold_run, lock_errors
from torchtitan_rl.errors import ConfigError

_HOLD = """
import os, sys, time
from pathlib import Path
from torchtitan_rl.config.run_lock import hold_run
with hold_run(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_a_second_run_in_a_folder_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "run"
    with hold_run(folder):
        assert folder.is_dir()
        with pytest.raises(ConfigError) as refused, hold_run(folder):
            pass
        (message,) = refused.value.errors
        assert message.startswith("name is run: ")
        assert f"process {os.getpid()} on {socket.gethostname()} runs in {folder}" in message
        assert lock_errors(folder) == [message]
    assert lock_errors(folder) == []
    with hold_run(folder):
        pass


def test_looking_changes_nothing(tmp_path: Path) -> None:
    assert lock_errors(tmp_path / "run") == []
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_no_lock_not_even_with_its_forked_children(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        (message,) = lock_errors(tmp_path)
        assert f"process {holder.pid} on" in message
        holder.kill()
        holder.wait()
        with hold_run(tmp_path):
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
