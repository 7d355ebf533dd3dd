"""The episodes of rewarded sessions, a JSON line each.

Invariant: a session's lines are all in the file or none is, also where the disk is full; after a
kill -9 in the middle of them its last line is gone, and no later line becomes part of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from torchtitan_rl.line_files import append_line, open_for_append
from torchtitan_rl.serving.session_record import SessionReport


class EpisodesFile:
    """Appends to ``path``; one writer.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_for_append(path)

    def write(self, report: SessionReport) -> None:
        """A line for each episode, with what its session says of all of them.

        Raises:
            OSError: nothing of the session was written.
        """
        session = report.to_json()
        of_all = {name: session[name] for name in ("session_id", "reward", "temperatures")}
        lines = [
            json.dumps({**of_all, **episode}, separators=(",", ":"), allow_nan=False) + "\n"
            for episode in session["episodes"]
        ]
        append_line(self._file, "".join(lines).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
