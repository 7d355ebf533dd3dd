"""``torchtitan-rl worker`` whose controllers may be silent for a few seconds only: ``python -m
tests.real.hosts.quick_worker ADDRESS SECONDS``."""

from __future__ import annotations

import sys

from torchtitan_rl.commands.worker import incarnation_command
from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.monarch_environment import set_monarch_environment
from torchtitan_rl.launch.workers import WorkerSupervisor, stopped_by_signals

if __name__ == "__main__":
    address, seconds = sys.argv[1:]
    set_monarch_environment(None, Address.parse(address), field="--keys")
    supervisor = WorkerSupervisor(
        incarnation_command(address),
        say=lambda line: print(f"worker: {line}", flush=True),
        silence_s=float(seconds),
    )
    with stopped_by_signals(supervisor):
        sys.exit(supervisor.run())
