"""The file with the episodes of rewarded sessions, one JSON line each.

Invariant: either all lines of a session are in the file or none is, also where the disk is full.
After a kill -9 in the middle of them the last, cut line is removed when the file is opened again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from torchtitan_rl.line_files import append_line, open_for_append
from torchtitan_rl.serving.session_report import SessionReport


class EpisodesFile:
    """Appends to ``path``; one writer.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_for_append(path)

    def write(self, report: SessionReport) -> None:
        """Write one line for each episode, with its session's id, its reward and its temperatures.

        Raises:
            OSError: nothing of the session was written.
        """
        lines = [
            json.dumps(
                {"session_id": report.session_id, **episode},
                separators=(",", ":"),
                allow_nan=False,
            )
            + "\n"
            for episode in report.to_json()["episodes"]
        ]
        append_line(self._file, "".join(lines).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
