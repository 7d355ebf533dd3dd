"""Writes the two files of a run that only its page reads.

``now.json`` says what the run does at this moment. It is replaced every `INTERVAL_S` seconds, and
removed at the run's end. ``launch.json`` says how the run was started. Neither is in the manifest.

Invariant: a disk that fails or hangs costs the run nothing. The files are then missing or old, and
the log says so once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_rl.config.loader import installed
from torchtitan_rl.config.machine import machine_facts
from torchtitan_rl.files import replace_file

logger = logging.getLogger(__name__)

NOW_FILE = "now.json"
LAUNCH_FILE = "launch.json"
INTERVAL_S = 2.0
_JOIN_S = 1.0  # at the end; a write that takes longer is left alone


class NowFile:
    """Writes ``now.json`` in a thread of its own, while `run` runs. ``take`` returns what it shall
    say, as JSON types; called on the event loop."""

    def __init__(self, folder: Path, take: Callable[[], Mapping[str, Any]]) -> None:
        self._path = folder / NOW_FILE
        self._take = take
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._write_all, name="now.json", daemon=True)
        self._thread.start()

    async def run(self) -> NoReturn:
        while True:
            if self._waiting.empty():  # otherwise the disk is slow
                self._waiting.put_nowait({"at_unix_s": time.time()} | dict(self._take()))
            await asyncio.sleep(INTERVAL_S)

    def close(self, *, keep: bool = False) -> None:
        """End the thread and remove the file, unless another controller owns the folder."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_JOIN_S)
        self._thread.join(_JOIN_S)
        if not keep and not self._thread.is_alive():
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write_all(self) -> None:
        has_warned = False
        while (document := self._waiting.get()) is not None:
            try:
                replace_file(self._path, json.dumps(document).encode(), is_durable=False)
            except OSError as error:
                if not has_warned:
                    logger.warning("the page does not show what happens now: %s", error)
                has_warned = True


def write_launch(
    folder: Path, *, command: str, resume_command: str, plan: Sequence[str], policy_dir: Path
) -> None:
    """Write ``launch.json`` into the folder of a run or an evaluation."""
    machine = machine_facts()
    document = {
        "begun_unix_s": time.time(),
        "command": command,
        "resume_command": resume_command,
        "versions": installed(),
        "machine": {
            "host": socket.gethostname(),
            "cores": machine.num_cores,
            "memory_bytes": machine.memory_bytes,
            "devices": list(machine.cuda_devices),
        },
        "plan": list(plan),
        "policy_dir": os.path.abspath(policy_dir),
    }
    _replace_launch(folder, document)


def add_to_launch(folder: Path, **entries: str) -> None:
    """Add to ``launch.json`` what only the started run knows."""
    with suppress(OSError):  # `write_launch` has said why
        document = json.loads((folder / LAUNCH_FILE).read_bytes())
        _replace_launch(folder, document | entries)


def _replace_launch(folder: Path, document: Mapping[str, Any]) -> None:
    try:
        replace_file(folder / LAUNCH_FILE, json.dumps(document).encode(), is_durable=False)
    except OSError as error:
        logger.warning("%s was not written: %s", LAUNCH_FILE, error)
