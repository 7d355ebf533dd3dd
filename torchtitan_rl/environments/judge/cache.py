"""Scores that were given before, in memory or in a file that outlives the run.

Invariant: at most ``size`` scores; the oldest are dropped first. Processes may share a file.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from torchtitan_rl.errors import ConfigError

_BUSY_TIMEOUT_S = 1.0  # another process writes; the event loop waits


class ScoreCache:
    """
    Raises:
        ConfigError: ``file`` cannot be opened, or is something else.
    """

    def __init__(self, size: int, file: Path | None = None) -> None:
        self._size = size
        try:
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                file or ":memory:",
                timeout=_BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS scores "
                "(number INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, score REAL NOT NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the judge's cache_file {file}: {error}; give another file, or delete this one"
            ) from error

    def get(self, key: str) -> float | None:
        """
        Raises:
            sqlite3.Error: the file cannot be read.
        """
        row = self._db.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def put(self, key: str, score: float) -> None:
        """
        Raises:
            sqlite3.Error: the file cannot be written.
        """
        if self._size == 0:
            return
        self._db.execute("INSERT OR REPLACE INTO scores (key, score) VALUES (?, ?)", (key, score))
        self._db.execute(
            "DELETE FROM scores WHERE number <= (SELECT max(number) FROM scores) - ?",
            (self._size,),
        )

    def close(self) -> None:
        self._db.close()
