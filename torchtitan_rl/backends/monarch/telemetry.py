"""Monarch's telemetry pages of a run on this machine: actors, messages and errors.

A process of its own serves the pages. It collects what the run's processes report through a socket
in the private folder, and asks Monarch for the processes and their actors. Invariants: it listens
only on the loopback; no byte is read from a connection that another user of this machine has
opened; it ends when the controller ends, even by SIGKILL; when it dies, the run continues.

Monarch starts these pages in its job API, which runs do not use. This module makes the same calls.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.launch.own_user import accept_own_user, is_allowed, use_private_folder
from torchtitan_rl.processes import end_with_parent

_START_S = 60.0
_KEPT_S = 3600  # how long messages and spans are kept
_SNAPSHOT_S = 10.0  # between two snapshots of the processes and their actors
_COMMAND = (sys.executable, "-P", "-m", __name__)


class TelemetryError(TorchtitanRLError):
    """The telemetry pages did not start."""


@asynccontextmanager
async def telemetry_pages(log_dir: Path) -> AsyncIterator[str]:
    """Serve the pages while the block is open; yields their URL. Only processes that are spawned
    while the block is open report. Raises TelemetryError: the pages did not start; their log says
    why."""
    from monarch._rust_bindings.monarch_distributed_telemetry import _set_unix_socket_sink_path
    from monarch._src.actor.proc_mesh import SetupActor
    from monarch.actor import this_host

    with (log_dir / "telemetry.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=PIPE,
            stdout=PIPE,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise TelemetryError(f"Monarch's telemetry did not start; see {log.name}")
        # Monarch's own function for this loads flask, which breaks vLLM's workers.
        report = functools.partial(_set_unix_socket_sink_path, str(_socket_path()))
        SetupActor.register_startup_function(lambda: report)
        report()
        process.stdin.write(await asyncio.to_thread(pickle.dumps, this_host()))
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _socket_path() -> Path:
    return use_private_folder() / "telemetry.sock"


def _serve() -> None:
    to_controller = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Monarch's messages go to the log
    from monarch import _rust_bindings
    from monarch._rust_bindings.monarch_extension.snapshot_integration import (
        _start_periodic_snapshots_http,
    )
    from monarch._src.actor.host_mesh import _spawn_admin
    from monarch._src.job import telemetry_actor, telemetry_config
    from monarch.actor import context
    from monarch.monarch_dashboard.server import app
    from werkzeug.serving import BaseWSGIServer

    accept_own_user(_rust_bindings.__file__, "accept4")
    BaseWSGIServer.verify_request = _is_own  # type: ignore[method-assign, assignment]
    create_app = app.create_app

    def create_guarded_app(adapter: Any) -> Any:
        created = create_app(adapter)
        # Otherwise another web site could read the pages through the user's browser.
        created.config["TRUSTED_HOSTS"] = ["127.0.0.1", "localhost"]
        return created

    app.create_app = create_guarded_app
    telemetry_actor.telemetry_socket_dir = lambda apply_id: str(_socket_path().parent)
    handle = telemetry_config._TelemetryHandle("run")
    config = {"retention_secs": _KEPT_S, "include_dashboard": False, "dashboard_port": 0}
    url = handle.open_or_refresh({}, config)["telemetry_url"]
    print(url, file=to_controller, flush=True)
    host = pickle.load(sys.stdin.buffer)
    _, admin = _spawn_admin([host], admin_addr="127.0.0.1:0", telemetry_url=url).get()
    instance = context().actor_instance._as_rust()
    _start_periodic_snapshots_http(
        base_url=url, admin_ref=admin, instance=instance, interval_secs=_SNAPSHOT_S
    )
    sys.stdin.buffer.read()  # until the controller has ended


def _is_own(server: Any, connection: socket.socket, address: Any) -> bool:
    return is_allowed(connection)


if __name__ == "__main__":
    _serve()
