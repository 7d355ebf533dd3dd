"""Sets the environment variables of Monarch, which must be set before Monarch is imported.

By default Monarch notices the loss of a host only after more than a minute. The first four limits
must be changed together: with a shorter watchdog but Monarch's default polling intervals, healthy
calls are ended.

By default, if nothing was acknowledged at an address for half a minute, a Monarch process also
gives up this address until the process ends. With the last two limits, a host can be attached there
again.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchtitan_rl.launch.addresses import Address

_ALWAYS = {
    "MONARCH_FILE_LOG": "error",  # the log file's size has no limit
    "HYPERACTOR_PROCESS_EXIT_TIMEOUT": "3s",  # wait before SIGTERM, and again before SIGKILL
}
_FAST_FAILURES = {
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "5s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "5s",
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "15s",
}
_RETURNS = {
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "24h",
    "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "24h",
}


def set_monarch_defaults() -> None:
    """Set the variables that every command needs. Variables that the user has set are kept."""
    for name, value in _ALWAYS.items():
        os.environ.setdefault(name, value)


def set_monarch_environment(keys: Path | None, own: Address, *, field: str) -> None:
    """Set the variables for several hosts: losses are noticed within 15 s, a lost host can be
    attached again and, with ``tls://``, all channels use the keys. Variables that the user has set
    are kept. ``own``: the address on which this process listens. Raises ConfigError, which names
    ``field``, if the keys cannot be used."""
    set_monarch_defaults()
    for name, value in (_FAST_FAILURES | _RETURNS).items():
        os.environ.setdefault(name, value)
    if own.scheme == "tls" and keys is not None:
        from torchtitan_rl.launch.keys import tls_environment  # loads cryptography

        os.environ |= tls_environment(keys, host=own.host, field=field)
