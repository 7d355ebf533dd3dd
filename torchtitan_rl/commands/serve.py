"""``torchtitan-rl serve MODEL [options]``: an OpenAI-compatible endpoint over replicas of a model.

When it is ready it prints the base URL, and nothing else, on stdout. SIGTERM or SIGINT ends it in
order: no new connection, a few seconds for running requests, then all processes; a second one ends
it at once.

Exit codes: 1 it did not start, the endpoint failed, or its process or the last replica was lost;
2 the options are wrong; 128 + n ended by signal n.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import tyro

from torchtitan_rl.config.serve import PreparedServe, ServeConfig, prepare_serve
from torchtitan_rl.errors import ConfigError, TorchtitanRLError
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.episodes_file import EpisodesFile
from torchtitan_rl.serving.service import EndpointService
from torchtitan_rl.serving.sessions import Sessions

_LOOK_S = 1.0  # between two looks whether a replica is left
_REQUEST_TIMEOUT_S = 3600.0  # where generator.request_timeout_s does not say


def main(arguments: Sequence[str]) -> int:
    """Run with command-line ``arguments``; returns the exit code."""
    is_dry_run = "--dry-run" in arguments
    words = [word for word in arguments if word != "--dry-run"]
    config = tyro.cli(ServeConfig, args=words, prog="torchtitan-rl serve")
    try:
        prepared = prepare_serve(config)
    except ConfigError as error:
        for message in error.errors:
            print(f"error: {message}", file=sys.stderr)
        return 2
    if is_dry_run:
        print(prepared.describe())
        return 0
    return run_serve(prepared)


def run_serve(prepared: PreparedServe) -> int:
    """Serves until a signal or an error; no process is left behind."""
    prepared.config.log_dir.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_run(prepared))


class _Signals:
    """The first SIGINT or SIGTERM asks what is served to end in order. A second one, or one while
    there is nothing yet to be ended in order, ends it at once."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.stop = asyncio.Event()
        self.is_serving = False

    def install(self) -> None:
        main_task = asyncio.current_task()
        if main_task is None:
            raise RuntimeError("signals are installed from within a task")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(
                number, self._on_signal, number, main_task
            )

    def _on_signal(self, number: int, main_task: asyncio.Task[Any]) -> None:
        self.received.append(number)
        if self.is_serving and len(self.received) == 1:
            self.stop.set()
        else:
            main_task.cancel()


async def _run(prepared: PreparedServe) -> int:
    signals = _Signals()
    signals.install()
    try:
        await _serve(prepared, signals)
    except asyncio.CancelledError:
        if not signals.received:
            raise
    except ConfigError as error:  # known only to vLLM, such as the name of a parser
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TorchtitanRLError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 128 + signals.received[0]


async def _serve(prepared: PreparedServe, signals: _Signals) -> None:
    from torchtitan_rl.backends.monarch.serve import serve_processes

    config = prepared.config
    async with AsyncExitStack() as stack:
        print(f"starting; logs are in {config.log_dir}", file=sys.stderr)
        processes = await stack.enter_async_context(serve_processes(prepared))
        router = GeneratorRouter(
            processes.replicas,
            request_timeout_s=config.generator.request_timeout_s or _REQUEST_TIMEOUT_S,
        )
        keep = None
        if config.episodes_file is not None:
            keep = stack.enter_context(EpisodesFile(config.episodes_file)).write
        sessions = Sessions(router, timeout_s=config.endpoint.session_timeout_s, keep=keep)
        stack.push_async_callback(sessions.aclose)
        service = await stack.enter_async_context(
            EndpointService(
                processes.endpoint,
                router,
                sessions,
                interval_s=config.endpoint.interval_s,
                handlers=sessions.handlers(),
                grace_s=config.grace_s,
            )
        )
        signals.is_serving = True
        print(processes.endpoint.base_url, flush=True)
        await _first_of(
            signals.stop.wait(), service.run_until_lost(), wait_until_no_replica(router)
        )


async def _first_of(*waits: Any) -> None:
    """Until one has ended; raises what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def wait_until_no_replica(router: GeneratorRouter) -> None:
    """Raises `GenerationError`, with every replica's cause, once none is left."""
    while True:
        router.require_live()
        await asyncio.sleep(_LOOK_S)
