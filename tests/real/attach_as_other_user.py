"""Attaches to a host of Monarch as another user of the machine, as Monarch's users do: ``python -m
tests.real.attach_as_other_user ADDRESS USER_ID``. Prints the user that its program then runs as."""

from __future__ import annotations

import os
import sys

import cloudpickle  # noqa: F401  (what Monarch imports later, this user may not be able to read)
import monarch._src.actor.bootstrap
import monarch._src.actor.host_mesh
import monarch._src.actor.proc_mesh  # noqa: F401
from monarch.actor import Actor, attach_to_workers, endpoint

TIMEOUT_S = 20.0


class Intruder(Actor):
    @endpoint
    def user(self) -> int:
        return os.getuid()


def main(address: str, user_id: int) -> None:
    os.setgroups([])
    os.setgid(user_id)
    os.setuid(user_id)
    try:
        host = attach_to_workers(ca="trust_all_connections", workers=[address])
        host.initialized.get(timeout=TIMEOUT_S)
        process = host.spawn_procs(per_host={"procs": 1}, name="intruder")
        user = process.spawn("intruder", Intruder).user.call_one().get(timeout=TIMEOUT_S)
        print(f"ran as user {user}", flush=True)
    except Exception as error:
        print(f"refused: {error}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
