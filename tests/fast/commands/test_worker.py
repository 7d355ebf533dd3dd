from __future__ import annotations

import contextlib
import os

from torchtitan_rl.commands.worker import _say


def test_a_worker_whose_output_nobody_reads_goes_on(monkeypatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        _say("a run has ended")
