"""``torchtitan-rl serve MODEL [options]``: an OpenAI-compatible endpoint over replicas of a model.

When the endpoint is ready, the command prints the base URL, and nothing else, on stdout. SIGTERM or
SIGINT ends it cleanly: it accepts no new connections, gives running requests a few seconds, and
ends all processes. A second signal ends it at once.

A lost endpoint is started again, at the same URL.

Exit codes: 1 the endpoint did not start, failed too often, or the last replica was lost; 2 the
options are wrong; 128 + n ended by signal n.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from torchtitan_rl.aio import first_of
from torchtitan_rl.commands.console import DryRun, StopSignals, run_command
from torchtitan_rl.commands.replicas import served
from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.config.serve import PreparedServe, ServeConfig, prepare_serve
from torchtitan_rl.serving.report import EpisodesFile
from torchtitan_rl.serving.restarts import EndpointRestarts
from torchtitan_rl.serving.service import EndpointService
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.tenancy.server import Tenants

_REQUEST_TIMEOUT_S = 3600.0  # if generator.request_timeout_s is not set


def main(words: Sequence[str]) -> int:
    dry_run, options = DryRun.of(words)
    prepared = prepare_serve(parse_options(ServeConfig, options, prog="torchtitan-rl serve"))
    if dry_run.is_wanted:
        return dry_run.show(prepared.describe(), prepared.document())
    log_dir = prepared.config.log_dir
    log_dir.mkdir(parents=True, exist_ok=True)
    return run_command(
        partial(_serve, prepared), log_dir=log_dir, when_stopped=f"logs are in {log_dir}"
    )


async def _serve(prepared: PreparedServe, signals: StopSignals) -> None:
    config = prepared.config
    print(
        f"serving {config.model}: {prepared.plan.summary()}; logs in {config.log_dir}",
        file=sys.stderr,
    )
    say = partial(print, file=sys.stderr)
    timeout_s = config.generator.request_timeout_s or _REQUEST_TIMEOUT_S
    async with AsyncExitStack() as stack:
        processes, router, loader = await stack.enter_async_context(
            served(prepared, name="serve", request_timeout_s=timeout_s, say=say)
        )
        assert processes.endpoint is not None  # the plan has an endpoint
        keep = None
        if config.episodes_file is not None:
            keep = stack.enter_context(EpisodesFile(config.episodes_file)).write
        tenants = None
        if prepared.slots is not None:
            tenants = await stack.enter_async_context(
                Tenants(
                    router,
                    loader.publish,
                    slots=prepared.slots,
                    policy_dir=prepared.policy_dir,
                    policy=read_architecture(prepared.policy_dir),
                    max_model_len=config.generator.max_model_len,
                )
            )
        sessions = Sessions(router, timeout_s=config.endpoint.session_timeout_s, keep=keep)
        stack.push_async_callback(sessions.aclose)
        # The layers of a model with adapters have other names, so nothing can be loaded.
        handlers = {} if prepared.adapters else loader.handlers()
        if tenants is not None:
            handlers = tenants.handlers()
        service = await stack.enter_async_context(
            EndpointService(
                processes.endpoint,
                router,
                sessions,
                interval_s=config.endpoint.interval_s,
                handlers=handlers,
                gauges=None if tenants is None else tenants.gauges,
                grace_s=config.grace_s,
                restarts=EndpointRestarts(
                    max_restarts=config.endpoint.max_restarts,
                    say=say,
                    on_failure=lambda failure: say(failure.describe()),
                ),
            )
        )
        stopped = asyncio.Event()
        signals.stop_cleanly = stopped.set
        print(processes.endpoint.base_url, flush=True)
        await first_of(stopped.wait(), service.run_until_lost(), router.wait_until_lost())
