"""The episodes of rewarded sessions, a JSON line each.

Invariant: a session's lines are all in the file or none is, also where the disk is full.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from torchtitan_rl.serving.session_record import SessionReport


class EpisodesFile:
    """Appends to ``path``; one writer.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

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
        left = memoryview("".join(lines).encode())
        start = self._file.tell()
        try:
            while left:  # a nearly full disk takes a part
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(start)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
