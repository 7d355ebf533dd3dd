"""Where Monarch logs to, once this package has been imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_START = """
import os
import torchtitan_rl.backends.monarch
import monarch.actor
monarch.actor.this_host().spawn_procs(per_host={"procs": 1}).stop().get()
for name in os.listdir("/proc/self/fd"):
    if os.path.exists(path := f"/proc/self/fd/{name}"):
        print(os.readlink(path))
"""


@pytest.mark.slow  # Monarch is imported and starts a process
def test_monarch_logs_to_stderr_and_to_no_file_that_others_may_have_put_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _START],
        env={**os.environ, "MONARCH_FILE_LOG": "debug"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "monarch_log" not in done.stdout
    assert "hyperactor" in done.stderr
