"""Runs training under torchrun, on one node or several:
``torchrun --nnodes=N --nproc-per-node=1 ... -m torchtitan_rl.launch CONFIG [options]``.

torchrun starts one launcher on each node, see `commands/launcher.py`. With one node the launcher
becomes the controller, as with ``torchtitan-rl train``. The launcher exits with the run's exit
code; torchrun itself exits with 1 for any failure, and shows the real code in its error report.
torchrun forwards SIGINT and SIGTERM, prints its own traceback (``SignalException``), and kills
processes that still run after ``--shutdown-timeout`` (30 s). So a step and its checkpoint must not
take longer than this time-out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torchtitan_rl.commands.cli import main as cli
from torchtitan_rl.commands.console import exit_code_of
from torchtitan_rl.config.loader import split_config
from torchtitan_rl.launch.meeting import Node, resume_options, without_torchrun

_USAGE = """\
usage: torchrun --nnodes=N --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500
                -m torchtitan_rl.launch CONFIG --launch.keys DIR [options]
Start it on each of N nodes. CONFIG --help lists the options.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of one launcher; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code_of(lambda: _main(words))


def _main(words: list[str]) -> int:
    node = Node.of(os.environ)
    environment = without_torchrun(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    if words in (["-h"], ["--help"]):
        print(_USAGE if node.rank == 0 else "", end="")
        return 0
    if {"-h", "--help"} & set(words):
        return cli(["train", *words]) if node.rank == 0 else 0
    if node.num_nodes == 1:
        return cli(["train", *words, *resume_options(words, is_again=node.restarts > 0)])
    split_config(words, prog="torchrun ... -m torchtitan_rl.launch")
    from torchtitan_rl.commands.launcher import launch  # imports torch

    return launch(node, words)


if __name__ == "__main__":
    sys.exit(main())
