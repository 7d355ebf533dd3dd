"""What Monarch must find in a process's environment before it is imported there.

By default it sees the loss of a host after more than a minute. The first four limits belong
together: a shorter watchdog with Monarch's own polling intervals ends healthy calls.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchtitan_rl.launch.addresses import Address

_ALWAYS = {
    "MONARCH_FILE_LOG": "error",  # it has no limit
    "HYPERACTOR_PROCESS_EXIT_TIMEOUT": "3s",  # until SIGTERM, and then SIGKILL, to one that hangs
}
_FAST_FAILURES = {
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "5s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "5s",
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "15s",
}


def set_monarch_defaults() -> None:
    """For every command. What the user has set stays."""
    for name, value in _ALWAYS.items():
        os.environ.setdefault(name, value)


def set_monarch_environment(keys: Path | None, own: Address, *, field: str) -> None:
    """For several hosts: losses seen within 15 s and, with ``tls://``, keys on all channels. What
    the user has set stays.

    Args:
        own: where this process listens.
        field: what gives the keys, for messages.

    Raises:
        ConfigError: the keys cannot be used.
    """
    set_monarch_defaults()
    for name, value in _FAST_FAILURES.items():
        os.environ.setdefault(name, value)
    if own.scheme == "tls" and keys is not None:
        from torchtitan_rl.launch.keys import tls_environment  # loads cryptography

        os.environ |= tls_environment(keys, host=own.host, field=field)
