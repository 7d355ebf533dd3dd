"""The console while a command attaches to its hosts."""

from __future__ import annotations

import os
import sys

import pytest

from torchtitan_rl.commands.attaching import silent_libraries


def test_what_native_code_writes_is_dropped_and_what_the_command_says_is_not(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout, sys.stderr
    with silent_libraries():
        os.write(1, b"noise")
        os.write(2, b"noise")
        print("stopped", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    os.write(1, b"after")
    assert capfd.readouterr() == ("after", "stopped\n")
