"""A run from torchrun: ``torchrun --nproc-per-node=1 -m torchtitan_rl.commands.torchrun CONFIG``.

torchrun starts one launcher process; the run's own processes are Monarch's, as with
``torchtitan-rl train``. The launcher's exit code is the run's. torchrun exits with 1 for any
failure; its error report shows the real code. It forwards SIGINT and SIGTERM, prints a traceback
of its own (``SignalException``), and kills what is left after ``--shutdown-timeout`` (30 s), which
a step and its checkpoint must fit in.
"""

from __future__ import annotations

import os
import sys

from torchtitan_rl.commands.cli import main as cli

# The launcher's rank in torchrun's group is not that of the processes it starts; with
# TORCHELASTIC_USE_AGENT_STORE they would wait indefinitely for a store that is not theirs.
_TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


def main() -> int:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        print(
            f"error: WORLD_SIZE is {os.environ['WORLD_SIZE']}: launch one process with "
            "--nproc-per-node=1; it starts all the others",
            file=sys.stderr,
        )
        return 2
    for name in list(os.environ):
        if name in _TORCHRUN_VARIABLES or name.startswith(_TORCHRUN_PREFIXES):
            del os.environ[name]
    return cli(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
