"""The launcher that torchrun starts."""

from __future__ import annotations

import pytest

from torchtitan_rl.commands.torchrun import main


def test_its_help_says_how_torchrun_starts_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: torchrun --nnodes=N")
