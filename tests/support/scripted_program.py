"""``worker`` and ``train`` as a launcher starts them, in milliseconds and without a run.

The controller appends its options to ``controllers.jsonl`` in the folder SCRIPTED_DIR, and does
what SCRIPTED_CONTROLLER says: ``exit 3``; ``wait`` for signals, note how many came, and exit with
128 + the first; ``fail once``, then exit with 0. A worker with SCRIPTED_WORKER ``fail`` exits
with 1.

``python -m tests.support.scripted_program launch CONFIG`` is a launcher that starts these.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PROGRAM = (sys.executable, "-m", "tests.support.scripted_program")


def main() -> int:
    match sys.argv[1:]:
        case ["launch", *words]:
            from torchtitan_rl.commands.console import exit_code_of
            from torchtitan_rl.commands.launcher import launch
            from torchtitan_rl.launch.meeting import Node, without_torchrun

            node = Node.of(os.environ)
            rest = without_torchrun(os.environ)
            os.environ.clear()
            os.environ.update(rest)
            return exit_code_of(lambda: launch(node, words, _PROGRAM))
        case ["worker", "--address", address, *_]:
            return _worker(address)
        case ["train", *words]:
            return _controller(words, Path(os.environ["SCRIPTED_DIR"]))
    return 2


def _worker(address: str) -> int:
    if os.environ.get("SCRIPTED_WORKER") == "fail":
        return 1
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print(f"worker: listening on {address}", flush=True)
    ended.wait()
    return 0


def _controller(words: list[str], folder: Path) -> int:
    log = folder / "controllers.jsonl"
    with log.open("a") as file:
        file.write(json.dumps(words) + "\n")
    match os.environ["SCRIPTED_CONTROLLER"].split():
        case ["exit", code]:
            return int(code)
        case ["fail", "once"]:
            return int(len(log.read_text().splitlines()) == 1)
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    (folder / "waits").touch()
    while not received:
        time.sleep(0.05)
    time.sleep(2)  # a second signal would come meanwhile
    (folder / "signals").write_text(f"{len(received)}")
    return 128 + received[0]


if __name__ == "__main__":
    sys.exit(main())
