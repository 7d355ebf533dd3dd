"""A controller that only attaches to a worker and watches its host: ``python -m
tests.real.hosts.watch_scenario OWN WORKER POLICY FOLDER SECONDS LOSSES``. Ends after that time, or
once the host was lost and is back so many times. Prints what happens, a JSON line each, with the
seconds since its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan_rl.commands.attaching import attach_once_free
from torchtitan_rl.config.run import LaunchConfig
from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.monarch_environment import set_monarch_environment

STARTED_S = time.monotonic()


def tell(event: str, **details: Any) -> None:
    seconds = round(time.monotonic() - STARTED_S, 1)
    print(json.dumps({"event": event, "at_s": seconds, **details}), flush=True)


async def watch(hosts: Any, folder: Path, seconds: float, num_losses: int) -> None:
    from monarch.actor import Actor, endpoint

    from torchtitan_rl.backends.monarch.host_watch import HostWatch
    from torchtitan_rl.backends.monarch.runtime import (
        call,
        spawn_processes,
        stop_processes,
        supervise,
    )
    from torchtitan_rl.config.plan import ProcessGroup

    class Talker(Actor):
        @endpoint
        async def talk(self, name: str) -> None:
            print(f"{name} runs", flush=True)

    supervise()
    is_lost = asyncio.Event()

    def on_lost(host: int, cause: str) -> None:
        tell("lost", host=host, cause=cause)
        is_lost.set()

    async def on_leaving(host: int) -> None:
        tell("leaving", host=host)

    async def spawn(name: str) -> Any:
        group = ProcessGroup(name=name, ranks=1, threads=1)
        mesh = await spawn_processes(group, log_dir=folder / "logs", hosts=hosts)
        await call(mesh.mesh.spawn("talker", Talker).talk.call(name), what="talk", timeout_s=30)
        tell("spawned", name=name)
        return mesh

    async with HostWatch(
        hosts,
        log_dir=folder / "logs",
        trace_dir=folder / "traces",
        say=lambda line: tell("said", line=line),
        on_lost=on_lost,
        on_leaving=on_leaving,
    ) as watching:
        meshes = [await spawn("replica0")]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for number in range(2, num_losses + 2):
                    await is_lost.wait()
                    is_lost.clear()
                    await watching.wait_until_there(0)
                    tell("back")
                    meshes.append(await spawn(f"replica0-{number}"))
        for mesh in meshes:  # those that are lost return at once
            await stop_processes(mesh)


def main() -> None:
    own, worker, policy, folder, seconds, losses = sys.argv[1:]
    launch = LaunchConfig(attach=(worker,), address=own, allow_plain_tcp=True)
    set_monarch_environment(None, Address.parse(own), field="launch.keys")
    from torchtitan_rl.backends.monarch.host_agent import describe_host
    from torchtitan_rl.backends.monarch.hosts import attach

    here = describe_host("local", policy)
    hosts = attach_once_free(
        lambda again: attach(
            launch, Address.parse(own), checkpoint=policy, here=here, is_again=again
        )
    )
    tell("attached")
    asyncio.run(watch(hosts, Path(folder), float(seconds), int(losses)))
    hosts.detach()
    tell("left")


if __name__ == "__main__":
    main()
