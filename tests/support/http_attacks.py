"""What hostile clients of the endpoint send, and what its process takes meanwhile."""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import psutil

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b"Content-Length: 1000000\r\n\r\n" + bytes(999_999)
KEY = b"Authorization: Bearer key\r\n"
HI = [{"role": "user", "content": "Hi"}]
HEALTH = b"GET /health HTTP/1.1\r\n\r\n"
_MAX_SENDING_S = 10.0

ATTACKS = {
    "one header without end": (20, POST + b"A: " + b"a" * (10 << 20)),
    "headers without end": (20, POST + b"A: a\r\n" * 1_000_000),
    "a URL without end": (20, b"GET /" + b"a" * (10 << 20)),
    "a chunk extension without end": (20, CHUNKED + b"1;a=" + b"a" * (10 << 20)),
    "complete trailers": (100, CHUNKED + b"0\r\n" + b"a:\r\n" * 60_000 + b"\r\n"),
    "complete heads": (1500, POST + b"a:\r\n" * 60_000 + b"\r\n"),
    "chunks of a byte": (250, CHUNKED + b"1\r\na\r\n" * 1_000_000),
    "trailers without end": (20, CHUNKED + b"0\r\nA: " + b"a" * (10 << 20)),
    "silence": (1500, b""),
    "heads without end": (1500, POST + b"A: " + b"a" * 10_000),
    "bodies without end": (1500, POST + BODY),
    "bodies of /health without end": (100, b"POST /health HTTP/1.1\r\n" + BODY),
    "requests for /health with bodies": (100, b"GET /health HTTP/1.1\r\n" + BODY),
    "requests before the answers": (20, HEALTH * 200_000),
    "web sockets": (
        1500,
        b"GET /health HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    ),
    "continuations that never come": (
        1500,
        POST + KEY + b"Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n",
    ),
}
"""By name: the number of connections, and what each sends and then stays open."""


def chat(**options: int) -> bytes:
    """A request with the key."""
    body = json.dumps({"model": "policy", "messages": HI, **options}).encode()
    return (
        POST
        + KEY
        + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


@dataclass
class Target:
    """An endpoint's process; its key is ``key``."""

    port: int
    process: psutil.Process

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, request: bytes) -> bytes:
        """All that comes until the server closes; empty where it closes without an answer."""
        with closing(self.connect()) as client, contextlib.suppress(ConnectionError):
            client.sendall(request)
            answer = b""
            while piece := client.recv(1 << 16):
                answer += piece
        return answer

    def status(self, request: bytes) -> int:
        """Of the answer; 0 where there is none."""
        answer = self.ask(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        return int(answer[9:12] or 0)

    def require_service(self) -> None:
        """`/health`, and a chat with the key, are answered."""
        assert self.status(HEALTH) == 200
        assert self.status(chat(max_tokens=1)) == 200

    @contextmanager
    def under(self, number: int, data: bytes) -> Iterator[None]:
        """Of so many connections each sends what the server takes of ``data``, and stays open."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for _ in range(number):
                client = stack.enter_context(closing(socket.socket()))
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", self.port))
                selector.register(client, selectors.EVENT_WRITE, memoryview(data))
            deadline = time.monotonic() + _MAX_SENDING_S
            while (ready := selector.select(0.3)) and time.monotonic() < deadline:
                for key, _ in ready:
                    try:
                        rest = key.data[key.fileobj.send(key.data[: 1 << 20]) :]
                    except BlockingIOError:
                        continue
                    except OSError:  # it was cut
                        rest = b""
                    if rest:
                        selector.modify(key.fileobj, selectors.EVENT_WRITE, rest)
                    else:
                        selector.unregister(key.fileobj)
            yield

    def wait_until_descriptors(self, most: int) -> None:
        """Wait until the process has at most so many."""
        deadline = time.monotonic() + 60
        while (number := self.process.num_fds()) > most:
            assert time.monotonic() < deadline, f"{number} descriptors, and there were {most}"
            time.sleep(0.05)

    def require_to_hold(self, attack: str, *, more_bytes: int) -> None:
        """It serves while and after; its memory grows by at most so many, and no descriptor stays
        open."""
        self.require_service()
        num_files = self.process.num_fds()
        memory = self.process.memory_info().rss
        with self.under(*ATTACKS[attack]):
            self.require_service()
            grown = self.process.memory_info().rss - memory
        assert grown < more_bytes, f"{grown >> 20} MiB"
        self.require_service()
        self.wait_until_descriptors(num_files)
