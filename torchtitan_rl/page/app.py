"""The HTTP application of the page, and who may read it.

It only reads: GET and HEAD, no request changes anything. All requests are answered on one event
loop, which between them follows the files of the runs in short pieces.

Who may read: without a key, processes of this user on this machine; with a key, who has it. A
request's ``Host`` must be the address that the page listens on. Otherwise another web site could
read the page through the user's browser, under a name that it points to this machine (DNS
rebinding).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchtitan_rl.aio import first_of
from torchtitan_rl.launch.own_user import accept_own_user
from torchtitan_rl.observability.trace import merge_traces
from torchtitan_rl.page import views
from torchtitan_rl.page.details import rollout_details, token_texts
from torchtitan_rl.page.index import RunIndex, parse_row
from torchtitan_rl.page.rollouts import ParameterError

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::\d*)?")
_POLL_S = 0.5
_PIECE_S = 0.02  # reading between two answers
_PIECE_BYTES = 256 << 10  # of a trace
_SILENCE_S = 15.0  # between two lines of an event stream
_MAX_NAMES = 400  # metrics in one answer
_MAX_CONNECTIONS = 256  # streams of events included


class Page:
    """The indexes of the runs, kept up to date by `follow`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.runs = [RunIndex(folder) for folder in folders]
        self._changed = asyncio.Event()

    def read(self, *, seconds: float) -> None:
        """Read the runs' files for up to about ``seconds`` each."""
        for run in self.runs:
            run.update(seconds=seconds)

    async def follow(self) -> None:
        """Read what is written to the runs' files, until cancelled."""
        while True:
            before = [dict(run.counters) for run in self.runs]
            has_more = [run.update(seconds=_PIECE_S) for run in self.runs]
            if before != [run.counters for run in self.runs]:
                self._changed.set()
                self._changed = asyncio.Event()
            await asyncio.sleep(0 if any(has_more) else _POLL_S)

    async def events(self) -> AsyncIterator[str]:
        """The counters of each run as server-sent events, whenever they have changed."""
        seen: list[dict[str, int]] = [{} for _ in self.runs]
        while True:
            changed = self._changed
            for number, run in enumerate(self.runs):
                if run.counters != seen[number]:
                    seen[number] = dict(run.counters)
                    data = msgspec.json.encode({"run": number} | run.counters).decode()
                    yield f"event: change\ndata: {data}\n\n"
            try:
                async with asyncio.timeout(_SILENCE_S):
                    await changed.wait()
            except TimeoutError:
                yield ": still here\n\n"
            await asyncio.sleep(_POLL_S / 2)  # many changes in a row are one event

    def close(self) -> None:
        for run in self.runs:
            run.close()


def page_app(page: Page, *, host: str, port: int, key: str = "") -> ASGIApp:
    """The application for a page that listens on this address."""

    def run_of(request: Request) -> RunIndex:
        number = request.path_params["run"]
        if not number.isascii() or not number.isdigit() or int(number[:9]) >= len(page.runs):
            raise HTTPException(404, f"run {number[:20]}: there are {len(page.runs)} runs, from 0")
        return page.runs[int(number[:9])]

    def route(path: str, answer: Callable[..., Any], known: Sequence[str] | None = ()) -> Route:
        """``answer`` gets the run, if the path names one, and the parameters, if there may be
        any."""

        async def handle(request: Request) -> Response:
            given = _parameters(request, known)
            run = [run_of(request)] if "run" in request.path_params else []
            return _json(answer(*run, *([] if known == () else [given])))

        return Route(f"/api/{path}", handle)

    def runs() -> list[Any]:
        return [views.describe_run(n, run) for n, run in enumerate(page.runs)]

    def metrics(run: RunIndex, given: Mapping[str, str]) -> Any:
        names = given.get("names")
        chosen = None if names is None else [name for name in names.split(",") if name]
        if chosen is not None and len(chosen) > _MAX_NAMES:
            raise ParameterError(f"names: give up to {_MAX_NAMES}")
        return views.metrics(run, chosen)

    async def rollout(request: Request) -> Response:
        _parameters(request, ())
        run, number = run_of(request), request.path_params["n"]
        found = None
        if number.isascii() and number.isdigit() and len(number) < 16:
            found = await show_rollout(run, int(number))
        if found is None:
            raise HTTPException(404, f"rollout {number[:20]}: no such rollout")
        return _json(found)

    async def trace(request: Request) -> Response:
        _parameters(request, ())
        folder = run_of(request).folder
        if not (folder / "traces").is_dir():
            raise HTTPException(404, "this run has no trace")
        try:
            content = await asyncio.to_thread(_merged_trace, folder / "traces")
        except OSError as error:
            raise HTTPException(500, f"the trace cannot be merged: {error}") from error
        name = {"content-disposition": 'attachment; filename="trace.json"'}
        return StreamingResponse(content, headers=name, media_type="application/json")

    async def events(request: Request) -> Response:
        _parameters(request, ())
        return StreamingResponse(page.events(), media_type="text/event-stream")

    of_run = "runs/{run}"
    routes = [
        route("runs", runs),
        route("catalogue", views.catalogue),
        Route("/api/events", events),
        route(f"{of_run}/overview", views.overview),
        route(f"{of_run}/metrics", metrics, ("names",)),
        route(f"{of_run}/rollouts", lambda run, given: run.rollouts.query(given), None),
        Route(f"/api/{of_run}/rollouts/{{n}}", rollout),
        route(f"{of_run}/timeline", views.show_timeline, None),
        Route(f"/api/{of_run}/trace.json", trace),
        route(f"{of_run}/now", views.now),
        route(f"{of_run}/config", views.configuration),
        Mount("/", StaticFiles(packages=[("torchtitan_rl.page", "static")], html=True)),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _refused, ParameterError: _wrong_parameter},
    )
    return _Guard(app, host=host, port=port, key=key)


def _merged_trace(traces: Path) -> Iterator[bytes]:
    """The pieces of the merged trace, from a file that has no name any more. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        file = merge_traces(traces, Path(folder) / "trace.json").open("rb")

    def pieces() -> Iterator[bytes]:
        with file:
            yield from iter(partial(file.read, _PIECE_BYTES), b"")

    return pieces()


async def show_rollout(run: RunIndex, n: int) -> dict[str, Any] | None:
    """One rollout with its tokens, its siblings, and others of its problem; None if there is none
    of this number."""
    related, place = run.rollouts.related(n), run.rollouts.place(n)
    if related is None or place is None:
        return None
    source, *where = place
    try:
        row = parse_row(run.sources[source].read(*where))
    except (OSError, ValueError):  # its file was cut, which `follow` will notice
        return None
    decode = await token_texts(views.policy_dir(run))
    return related | rollout_details(row, decode)


class _Guard:
    """Refuses what may not be read, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, *, host: str, port: int, key: str) -> None:
        self._app = app
        self._hosts = {host.strip("[]").lower(), "localhost", "127.0.0.1", "::1"}
        self._is_any_host = host in ("0.0.0.0", "::")
        self._key = key.encode(errors="surrogateescape")
        self._cookie = f"torchtitan_rl_page_{port}"
        self._cookie_value = hmac.digest(self._key, b"page", hashlib.sha256).hex()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(Request(scope))
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return _error(405, "the page only reads: use GET", {"allow": "GET, HEAD"})
        if not self._is_any_host and _host_of(request) not in self._hosts:
            return _error(421, "the Host header is not the address that the page listens on")
        if not self._key:
            return None
        given = request.query_params.get("key")
        if given is not None and hmac.compare_digest(given.encode(), self._key):
            rest = [(n, v) for n, v in request.query_params.multi_items() if n != "key"]
            # One slash: a path that begins with two would name another host.
            target = "/" + quote(request.scope["path"].lstrip("/"))
            target += f"?{urlencode(rest)}" if rest else ""
            answer = Response(status_code=303, headers={"location": target})
            answer.set_cookie(self._cookie, self._cookie_value, httponly=True, samesite="strict")
            return answer
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        cookie = request.cookies.get(self._cookie, "")
        has_token = scheme.lower() == "bearer" and hmac.compare_digest(
            token.strip().encode(), self._key
        )
        if has_token or hmac.compare_digest(cookie.encode(), self._cookie_value.encode()):
            return None
        return _error(401, "give the page's key: ?key=... or a bearer token")


def _host_of(request: Request) -> str:
    """The name in the ``Host`` header, without port and brackets; empty if it is not there once."""
    values = request.headers.getlist("host")
    found = _HOST.fullmatch(values[0].lower()) if len(values) == 1 else None
    return "" if found is None else found[1].strip("[]")


def _parameters(request: Request, known: Sequence[str] | None) -> Mapping[str, str]:
    """Raises ParameterError if a parameter is not ``known`` (if any is), or given twice."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in found:
            raise ParameterError(f"{name[:50]}: give it once")
        if known is not None and name not in known:
            raise ParameterError(f"{name[:50]}: no such parameter")
        found[name] = value
    return found


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    content = msgspec.json.encode({"error": message})
    return Response(content, status, dict(headers or {}), media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, error.headers)


async def _wrong_parameter(request: Request, error: Exception) -> Response:
    return _error(400, str(error))


def serve_page(page: Page, listening: socket.socket, *, host: str, key: str) -> None:
    """Serve until a signal ends it. Without a key, only processes of this user on this machine are
    served, and those of other machines; so an address that other machines can reach needs a key.
    """
    import uvloop

    from torchtitan_rl.serving.connections import ConnectionLimits, bounded_server

    if not key:
        accept_own_user(uvloop.loop.__file__, "accept4")

    async def serve() -> None:
        port = listening.getsockname()[1]
        limits = ConnectionLimits(max_connections=_MAX_CONNECTIONS, head_s=10.0)
        server = bounded_server(page_app(page, host=host, port=port, key=key), limits)
        await first_of(server.serve(sockets=[listening]), page.follow())

    try:
        uvloop.run(serve())
    finally:
        page.close()
