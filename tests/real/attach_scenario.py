"""Attaches to the worker at an address and prints what a process that it starts answers."""

from __future__ import annotations

import sys
from pathlib import Path

from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.monarch_environment import set_monarch_environment


def main(worker: str, own: str, keys: str, timeout_s: str) -> None:
    set_monarch_environment(Path(keys), Address.parse(own), field="keys")
    from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint

    class Echo(Actor):
        @endpoint
        def echo(self, word: str) -> str:
            return word

    enable_transport(own)
    host = attach_to_workers(ca="trust_all_connections", workers=[worker])
    host.initialized.get(timeout=float(timeout_s))
    echo = host.spawn_procs(per_host={"procs": 1}).spawn("echo", Echo)
    print(echo.echo.call_one("attached").get(timeout=60), flush=True)
    host.stop().get(timeout=20)


if __name__ == "__main__":
    main(*sys.argv[1:])
