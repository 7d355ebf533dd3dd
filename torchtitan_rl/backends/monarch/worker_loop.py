"""The process of one life of a worker: ``python -m torchtitan_rl.backends.monarch.worker_loop
ADDRESS``. It serves the controller that attaches to it; `launch.workers` starts and ends it."""

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

    # Of the messages that a controller has sent to this address some are lost, with a life or an
    # attempt to attach: Monarch would hold back all that follow. Their channel keeps the order.
    configure(enable_dest_actor_reordering_buffer=False)
    (address,) = sys.argv[1:]
    lifetime = start_worker_loop_forever(address=address, ca="trust_all_connections")
    try:
        while not accepts(address):
            with suppress(TimeoutError):
                lifetime.get(timeout=_POLL_S)
        print(f"worker: listening on {address}", flush=True)
        lifetime.get()
    except (RuntimeError, ValueError) as error:  # of the system, as text
        print(f"worker: {address}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
