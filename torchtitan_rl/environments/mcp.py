"""Tools of MCP servers: for your own environments, and for a `DataTask` that answers with them.

A session connects to a server: a process on standard streams, or an address. The `mcp` library
binds a connection to the asyncio task that opened it, so each session runs in its own task; other
tasks may call its tools. (The library's `ClientSessionGroup` also belongs to one task, reads only
the first page of the tools, and drops a server's standard error.)

Invariant: when the session ends, its task, the server's process and all processes that the server
started end, too. The library closes the server's input, waits, and then ends `shim.py`, the
server's parent, which kills all processes that are left, also if this process is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, TextIO
from weakref import WeakKeyDictionary

from torchtitan_rl.aio import wait_within
from torchtitan_rl.bounds import KEY_IN_HEADERS, CallSeconds, Positive
from torchtitan_rl.data.columns import server_errors, url_errors
from torchtitan_rl.data.rows import require
from torchtitan_rl.environments.data_task import DataTask, tool_environment
from torchtitan_rl.environments.question import ToolAnswer
from torchtitan_rl.errors import ConfigError, TorchtitanRLError, one_line
from torchtitan_rl.files import last_lines
from torchtitan_rl.processes import shim_command
from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig

_MAX_PAGES = 100  # pages of the list of tools
_SESSION_ENDED = "Session terminated"  # message of an error that has no code of its own
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)  # the syntax of `os.path.expandvars`
STARTS_PER_CORE = 2  # more starts at once would only slow each other down

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, McpSession]] = WeakKeyDictionary()


class McpServerError(TorchtitanRLError):
    """A server cannot be reached, or its session was lost. The message names it and the cause."""


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """An MCP server: a ``command`` to start or a ``url``. In ``env`` and ``headers``, ``$NAME``
    stands for an environment variable, so that configurations contain no secrets."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server on standard streams; each session starts a process."""
    url: Annotated[str, KEY_IN_HEADERS] = ""
    """Address of a server with streamable HTTP, such as ``http://127.0.0.1:8000/mcp``."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of ``command``, besides PATH, HOME and a few others."""
    headers: dict[str, str] = field(default_factory=dict)
    """HTTP headers for ``url``, such as ``{"Authorization": "Bearer $TOKEN"}``."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the policy may call. Empty: all tools."""
    shared: bool = False
    """One session for all rollouts, for servers that keep no state; otherwise each rollout has a
    session (and, with ``command``, a process) of its own."""
    start_timeout_s: CallSeconds = 30.0
    """Seconds until the server has listed its tools; below ``rollout.step_timeout_s``. With
    ``command``, two servers per core start at the same time; the wait before a start counts only
    against ``rollout.step_timeout_s``."""
    call_timeout_s: CallSeconds = 30.0
    """Seconds for one call, below ``rollout.step_timeout_s``; if it takes longer, the policy
    gets an error as the answer."""
    in_order: bool = False
    """Whether the calls of one message run one after another. Needed if a call changes the result
    of the next one (write, then read). All calls together may take ``rollout.step_timeout_s``.
    If False, they run concurrently."""
    max_answer_chars: Positive = 4000
    """Characters after which an answer is cut off."""

    def resume_identity(self) -> Mapping[str, Any]:
        return {"url": None, "start_timeout_s": None}

    def errors(self, section: str) -> list[str]:
        found = []
        if bool(self.command) == bool(self.url):
            found.append(f"{section}: give either command or url")
        if self.shared and self.in_order:
            found.append(f"{section}: shared and in_order are True: leave in_order out")
        if self.url:
            found += url_errors(self, section, "url")
        return found


class McpSession:
    """A session with one server. Use it once: `start`, then `call` any number of times, also
    concurrently, then `close`."""

    def __init__(self, name: str, server: McpServer) -> None:
        self._name = name
        self._server = server
        self._client: Any = None
        self._may_end = asyncio.Event()
        self._begins = asyncio.Event()  # the server may be started now, or the session has failed
        self._order = asyncio.Lock()  # first come, first served
        self._task: asyncio.Task[None] | None = None
        self._words: TextIO | None = None  # the server's standard error
        self._tools: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.is_lost = False

    async def start(self) -> list[Mapping[str, Any]]:
        """Connect, and return the schemas of the tools. May be called again, and by several tasks
        at once. Raises McpServerError: the server cannot be reached, does not answer in time, or
        lacks one of the configured tools."""
        if self._task is None:
            self._task = asyncio.create_task(self._serve(), name=f"MCP server {self._name}")
        await self._begins.wait()
        if not await wait_within(self._server.start_timeout_s, self._tools):
            self._give_up(self._task, f"no list of tools after {self._server.start_timeout_s:g} s")
        if (error := self._tools.exception()) is not None:
            raise McpServerError(str(error)) from error
        tools = {tool.name: tool for tool in self._tools.result()}
        if missing := sorted(set(self._server.tools) - tools.keys()):
            raise self._lost(f"it has no tool {missing[0]!r}; it has {', '.join(tools)}")
        return [_schema(tools[name]) for name in self._server.tools or tools]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Call a tool. An error of the tool is an answer with ``failed``. Raises McpServerError:
        the session is lost."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT
        from pydantic import ValidationError

        limit_s = self._server.call_timeout_s
        try:
            async with self._order if self._server.in_order else nullcontext():
                result = await self._client.call_tool(name, arguments, read_timeout_seconds=limit_s)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or error.message == _SESSION_ENDED:
                raise self._lost(one_line(error)) from error
            is_late = error.code == REQUEST_TIMEOUT
            text = f"no answer after {limit_s:g} s" if is_late else error.message
            return ToolAnswer(text=f"error: {text}", failed=True)
        except ValidationError:  # the tool's result is invalid
            return ToolAnswer(text="error: the tool's answer does not fit its schema", failed=True)
        except Exception as error:  # from the HTTP client, closed streams, ...
            raise self._lost(one_line(error)) from error
        text = _text(result)
        left_out = len(text) - self._server.max_answer_chars
        if left_out > 0:
            text = f"{text[:-left_out]}... ({left_out} characters more)"
        prefix = "error: " if result.is_error else ""
        return ToolAnswer(text=prefix + text, failed=result.is_error)

    async def close(self) -> None:
        """End the session, and the server's process. No effect if it has ended."""
        if self._task is None:
            return
        self._may_end.set()
        if not self._tools.done():  # not connected yet, and it may never be
            self._give_up(self._task, "the session was closed")
        await asyncio.wait({self._task})

    def _give_up(self, task: asyncio.Task[None], cause: str) -> None:
        """Stop connecting. Called once: a second cancellation would interrupt the library as it
        ends the process."""
        self._fail(cause)
        task.cancel()

    async def _serve(self) -> None:
        client_class = require("mcp", "mcp").Client
        with TemporaryFile("w") as self._words:
            try:
                async with AsyncExitStack() as turn:
                    if self._server.command:
                        await turn.enter_async_context(_turn_to_start())
                    self._begins.set()
                    async with self._transport() as transport, client_class(transport) as client:
                        tools = await _all_tools(client)
                        await turn.aclose()
                        self._client = client
                        self._tools.set_result(tools)
                        await self._may_end.wait()
            except Exception as error:  # an exception group if the library runs several tasks
                self._fail(one_line(error))
            finally:
                self._fail("the session was closed")

    def _fail(self, cause: str) -> None:
        """End the session, and wake the callers of `start` with the cause."""
        error = self._lost(cause)
        if not self._tools.done():
            self._tools.set_exception(error)
            self._tools.exception()  # mark as retrieved: callers may no longer wait
        self._begins.set()

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[AbstractAsyncContextManager[Any]]:
        server = self._server
        if server.url:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            timeout = httpx2.Timeout(server.start_timeout_s, read=None)  # calls limit their reads
            headers = _expanded(server.headers)
            async with httpx2.AsyncClient(headers=headers, timeout=timeout) as http_client:
                yield streamable_http_client(server.url, http_client=http_client)
            return
        from mcp.client.stdio import StdioServerParameters, stdio_client

        env = _expanded(server.env)
        program = server.command[0]
        if shutil.which(program, path=env.get("PATH")) is None:
            raise FileNotFoundError(f"there is no program {program!r}")
        python, *shim = shim_command(f"parent={os.getpid()}")
        parameters = StdioServerParameters(command=python, args=[*shim, *server.command], env=env)
        yield stdio_client(parameters, errlog=self._words)

    def _lost(self, cause: str) -> McpServerError:
        """Mark the session as lost, and return the error to raise."""
        self.is_lost = True
        self._may_end.set()
        where = self._server.url or " ".join(self._server.command)
        return McpServerError(f"MCP server {self._name} ({where}): {cause}{self._last_words()}")

    def _last_words(self) -> str:
        if self._words is None or self._words.closed:
            return ""
        words = last_lines(Path(f"/proc/self/fd/{self._words.fileno()}"), 1)
        return f"; its last words: {words[0].strip()}" if words else ""


def _turn_to_start() -> asyncio.Semaphore:
    cores = len(os.sched_getaffinity(0))
    loop = asyncio.get_running_loop()
    return _turns.setdefault(loop, asyncio.Semaphore(STARTS_PER_CORE * cores))


async def _all_tools(client: Any) -> list[Any]:
    tools, cursor = [], None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _text(result: Any) -> str:
    """The text of a result; contents of other types are replaced by their type."""
    parts = []
    for content in result.content:
        resource = getattr(content, "resource", None)
        text = getattr(content, "text", None) or getattr(resource, "text", None)
        parts.append(f"[{content.type}]" if text is None else text)
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts)


def _expanded(values: Mapping[str, str]) -> dict[str, str]:
    return {name: os.path.expandvars(value) for name, value in values.items()}


class McpTools:
    """The `Tools` of one rollout: the tools of all servers. A shared session stays open until the
    event loop ends; a lost one is replaced for rollouts that begin later."""

    def __init__(self, servers: Mapping[str, McpServer]) -> None:
        self._servers = servers
        self._own: list[McpSession] = []
        self._session_of: dict[str, McpSession] = {}

    async def open(self) -> list[Mapping[str, Any]]:
        """Connect to all servers, and return the schemas of their tools. McpServerError: a server
        cannot be reached, or two have a tool of the same name."""
        sessions = {name: self._session(name, server) for name, server in self._servers.items()}
        schemas = await asyncio.gather(*(session.start() for session in sessions.values()))
        for (name, session), tools in zip(sessions.items(), schemas, strict=True):
            for tool in tools:
                tool_name = tool["function"]["name"]
                if tool_name in self._session_of:
                    why = f"another server has a tool {tool_name}, too; choose one by `tools`"
                    raise McpServerError(f"MCP server {name}: {why}")
                self._session_of[tool_name] = session
        return [tool for tools in schemas for tool in tools]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Call a tool on its server; McpServerError if the server was lost."""
        session = self._session_of.get(name)
        if session is None:
            names = ", ".join(self._session_of)
            return ToolAnswer(text=f"error: no tool {name!r}; there are {names}", failed=True)
        return await session.call(name, arguments)

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._own))

    def _session(self, name: str, server: McpServer) -> McpSession:
        if not server.shared:
            self._own.append(McpSession(name, server))
            return self._own[-1]
        sessions = _shared.setdefault(asyncio.get_running_loop(), {})
        key = json.dumps([name, asdict(server)])
        if key not in sessions or sessions[key].is_lost:
            sessions[key] = McpSession(name, server)
        return sessions[key]


@dataclass(frozen=True, kw_only=True)
class McpTask(DataTask):
    """Questions of a `DataTask` that are answered with the tools of MCP servers::

        McpTask(
            train=("data/train.jsonl",),
            servers={"files": McpServer(command=("my-mcp-server", "--root", "data"))},
        )

    A completion without a call is the answer. The model's chat format must have tools (Qwen3 and
    others), and ``rollout.max_turns`` must allow for the calls.
    """

    servers: dict[str, McpServer] = field(default_factory=dict)
    """The servers, each under a name for error messages."""
    shows_tools: bool = True
    """Whether the chat format puts the tools' schemas into the prompt. Off where ``system``
    describes them in fewer tokens, or the policy knows them."""
    replays: bool = False
    """Whether the tools answer the same again and change nothing outside of a rollout, so that a
    resumed run can make its calls again; otherwise it starts such rollouts again."""

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        tools = McpTools(self.servers)
        shown = {"replays": self.replays, "shows_tools": self.shows_tools}
        return tool_environment(self, tools, problem, tokenizer, **shown)

    def errors(self) -> list[str]:
        found = super().errors()
        if not self.servers:
            found.append("task.servers is empty: give a server")
        try:
            require("mcp", "mcp")
        except ConfigError as error:
            found.append(f"task: {error}")
        for name, server in self.servers.items():
            section = f"task.servers.{name}"
            found += server.errors(section) or _absences(section, server)
        return found


def _absences(section: str, server: McpServer) -> list[str]:
    """The requirements of a server that this machine does not meet, one message each."""
    found = []
    for kind, values in (("env", server.env), ("headers", server.headers)):
        for key, value in values.items():
            names = [one.strip("{}") for one in _VARIABLE.findall(value)]
            if unset := [one for one in names if one not in os.environ]:
                why = f"{key} names {unset[0]}, which is not set; export it"
                found.append(f"{section}.{kind}: {why}")
    path = _expanded(server.env).get("PATH")
    if server.command and shutil.which(server.command[0], path=path) is None:
        why = f"there is no program {server.command[0]!r}; install it, or give a path"
        found.append(f"{section}.command: {why}")
    return found or (server_errors(server, section, "url") if server.url else [])


def parts_of(task: Task, name: str = "task") -> Iterator[tuple[str, Task | McpServer]]:
    """Yield the task, its parts and all their servers, each with the name of its field."""
    yield name, task
    for one in fields(task):
        value = getattr(task, one.name)
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for key, part in parts:
            part_name = f"{name}.{one.name}.{key}".rstrip(".")
            if isinstance(part, McpServer):
                yield part_name, part
            elif isinstance(part, Task):
                yield from parts_of(part, part_name)


def sharing_servers(part: Any) -> Any:
    """The task, with all its servers ``shared``: enough to show prompts."""
    if isinstance(part, McpServer):
        return replace(part, shared=True)
    if isinstance(part, dict):
        return {name: sharing_servers(one) for name, one in part.items()}
    if not isinstance(part, Task):
        return part
    changes = {one.name: sharing_servers(getattr(part, one.name)) for one in fields(part)}
    return replace(part, **changes)
