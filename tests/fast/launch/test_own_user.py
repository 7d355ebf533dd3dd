"""Connections of other users, as many as they like."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.support.other_user import as_other_user, needs_root

SERVER = """
import asyncio, socket, sys
import uvloop
from torchtitan_rl.launch.own_user import accept_own_user

async def main():
    turns = 0
    served = asyncio.Event()

    async def serve(reader, writer):
        writer.close()
        served.set()

    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    print(listener.getsockname()[1], flush=True)
    sys.stdin.readline()
    await asyncio.start_server(serve, sock=listener)
    while not served.is_set():
        turns += 1
        await asyncio.sleep(0)
    print(turns)

accept_own_user(uvloop.loop.__file__, "accept4")
uvloop.run(main())
"""


@needs_root
def test_an_event_loop_does_its_other_work_between_the_connections_of_others() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        address = "127.0.0.1", int(server.stdout.readline())

        def flood() -> str:
            held = [socket.create_connection(address) for _ in range(100)]
            return str(len(held))

        assert as_other_user(flood) == "100"
        with socket.create_connection(address):
            out, _ = server.communicate("go\n")
        assert int(out) > 100
