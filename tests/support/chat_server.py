"""A chat endpoint in a thread of this process, which answers by a function."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ChatServer:
    """``reply`` gets the messages and returns an answer's text; None is a closed session."""

    reply: Callable[[list[Any]], str | None] = lambda messages: "no"
    asked: list[tuple[str, str, list[Any]]] = field(default_factory=list)  # key, session, messages
    deleted: list[str] = field(default_factory=list)
    base_url: str = ""


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    served = ChatServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            key = self.headers["authorization"].removeprefix("Bearer ")
            served.asked.append((key, self.headers["x-session-id"], body["messages"]))
            text = served.reply(body["messages"])
            if text is None:
                self._answer(400, {"error": {"message": "closed", "code": "session_closed"}})
                return
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
            self._answer(
                200,
                {
                    "id": "chatcmpl-1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": body["model"],
                    "choices": [choice],
                    "usage": usage,
                },
            )

        def do_DELETE(self) -> None:
            served.deleted.append(self.path.rpartition("/")[2])
            self._answer(200, {})

        def _answer(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
