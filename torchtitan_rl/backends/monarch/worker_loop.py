"""One *incarnation* of a worker: the process that serves one run, ``python -m
torchtitan_rl.backends.monarch.worker_loop ADDRESS``. It serves the controller that attaches to it;
`launch.workers` starts and ends the process."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

from torchtitan_rl.launch.interfaces import accepts
from torchtitan_rl.processes import end_with_parent

_POLL_S = 0.1


def main() -> int:
    end_with_parent(signal.SIGKILL)
    from monarch.actor import start_worker_loop_forever
    from monarch.config import configure

    # Some messages to this address are lost when an incarnation ends or an attempt to attach fails.
    # Monarch would then hold back all later messages, to deliver them in order. The channel keeps
    # the order anyway.
    configure(enable_dest_actor_reordering_buffer=False)
    (address,) = sys.argv[1:]
    lifetime = start_worker_loop_forever(address=address, ca="trust_all_connections")
    try:
        while not accepts(address):
            with suppress(TimeoutError):
                lifetime.get(timeout=_POLL_S)
        print(f"worker: listening on {address}", flush=True)
        lifetime.get()
    except (RuntimeError, ValueError) as error:  # errors of the operating system, as text
        print(f"worker: {address}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
