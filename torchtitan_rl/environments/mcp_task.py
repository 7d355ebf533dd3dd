"""Tools of MCP servers: for environments of your own, and a `DataTask` that answers with them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torchtitan_rl.data.rows import require
from torchtitan_rl.environments.data_task import DataTask
from torchtitan_rl.environments.mcp_session import McpServer, McpServerError, McpSession
from torchtitan_rl.environments.tool_env import ToolAnswer, ToolEnv
from torchtitan_rl.errors import ConfigError, one_line
from torchtitan_rl.rollout.chatml import ChatMLRenderer
from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.message_env import MessageTokenEnv
from torchtitan_rl.rollout.rendering import make_renderer
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig

_ANSWER_TIMEOUT_S = 10.0
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)  # as `os.path.expandvars` has them
_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, McpSession]] = WeakKeyDictionary()


class McpTools:
    """The `Tools` of one rollout: those of all servers.

    A session that is shared stays until the event loop ends; one that was lost is replaced for the
    rollouts that begin later.
    """

    def __init__(self, servers: Mapping[str, McpServer]) -> None:
        self._servers = servers
        self._own: list[McpSession] = []
        self._session_of: dict[str, McpSession] = {}

    async def open(self) -> list[Mapping[str, Any]]:
        """
        Raises:
            McpServerError: a server cannot be reached, or two have a tool of the same name.
        """
        sessions = {name: self._session(name, server) for name, server in self._servers.items()}
        schemas = await asyncio.gather(*(session.start() for session in sessions.values()))
        found: list[Mapping[str, Any]] = []
        for (name, session), tools in zip(sessions.items(), schemas, strict=True):
            for tool in tools:
                tool_name = tool["function"]["name"]
                if tool_name in self._session_of:
                    raise McpServerError(
                        f"MCP server {name}: another server has a tool {tool_name}, too; choose "
                        "one by `tools`"
                    )
                self._session_of[tool_name] = session
                found.append(tool)
        return found

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """
        Raises:
            McpServerError: the server was lost.
        """
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

    A completion without a call is the answer. Needs a model whose chat format has tools (Qwen3 and
    others), and room in ``rollout.max_turns`` for the calls.
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
        renderer = make_renderer(tokenizer, kind=self.renderer, thinking=self.thinking)
        if isinstance(renderer, ChatMLRenderer):
            raise ConfigError(
                "task.servers: the policy's chat format has no tools; give a model that has (such "
                "as Qwen3), or task.renderer qwen3"
            )
        score = partial(self.score, problem=problem)
        env = ToolEnv(
            problem.data["messages"],
            McpTools(self.servers),
            score,
            replays=self.replays,
            shows_tools=self.shows_tools,
        )
        return MessageTokenEnv(env, renderer)

    def errors(self) -> list[str]:
        found = super().errors()
        if not self.servers:
            found.append("task.servers is empty: give a server")
        try:
            require("mcp", "mcp")
        except ConfigError as error:
            found.append(f"task: {error}")
        for name, server in self.servers.items():
            wrong = server.errors(f"task.servers.{name}")
            found += wrong or _absences(f"task.servers.{name}", server)
        return found


def _absences(name: str, server: McpServer) -> list[str]:
    """What a server needs and this machine does not have."""
    found = []
    env = {key: os.path.expandvars(value) for key, value in server.env.items()}
    for kind, values in (("env", server.env), ("headers", server.headers)):
        for key, value in values.items():
            names = [one.strip("{}") for one in _VARIABLE.findall(value)]
            if unset := [one for one in names if one not in os.environ]:
                found.append(f"{name}.{kind}: {key} names {unset[0]}, which is not set; export it")
    if server.command and shutil.which(server.command[0], path=env.get("PATH")) is None:
        program = server.command[0]
        found.append(f"{name}.command: there is no program {program!r}; install it, or give a path")
    if server.url and not found:
        import httpx

        try:
            with httpx.stream("HEAD", server.url, timeout=_ANSWER_TIMEOUT_S):
                pass  # any answer will do
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            found.append(
                f"{name}.url={server.url!r}: no server answers ({one_line(error)}); "
                "start it before the run"
            )
    return found


def parts_of(task: Task, name: str = "task") -> Iterator[tuple[str, Task | McpServer]]:
    """The task, its parts and the servers of all of them, with the names of their fields."""
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


def sharing_servers(task: Task) -> Task:
    """The task, and its parts, with one session for all rollouts: enough to look at prompts."""
    changes: dict[str, Any] = {}
    for one in fields(task):
        value = getattr(task, one.name)
        if isinstance(value, Task):
            changes[one.name] = sharing_servers(value)
        elif isinstance(value, dict):
            changes[one.name] = {name: _sharing(part) for name, part in value.items()}
    return replace(task, **changes)


def _sharing(part: Any) -> Any:
    if isinstance(part, McpServer):
        return replace(part, shared=True)
    return sharing_servers(part) if isinstance(part, Task) else part
