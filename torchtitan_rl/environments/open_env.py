"""Environments of OpenEnv servers, as a `Task`: each rollout has its own session.

This module implements the server's WebSocket protocol itself: after a lost connection the `openenv`
package's client reconnects to a new environment, and the rollout would continue in another game.
The package's requirements also conflict with vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from torchtitan_rl.bounds import KEY_IN_HEADERS
from torchtitan_rl.data.columns import server_errors
from torchtitan_rl.data.rows import require
from torchtitan_rl.environments.games import TEXTS, Game, GameTask, InvalidActionError, Move
from torchtitan_rl.errors import TorchtitanRLError, one_line

_SHORT_CHARS = 60
_LONG_CHARS = 300
_MAX_MESSAGE_BYTES = 1 << 26
_PAUSE_S = 0.5  # pause between two attempts to connect


class OpenEnvError(TorchtitanRLError):
    """A server cannot be reached, refused a request, or was lost."""


@dataclass(frozen=True, kw_only=True)
class OpenEnvTask(GameTask):
    """An environment of an OpenEnv server that runs::

        OpenEnvTask(
            url="http://127.0.0.1:8000",
            action_field="move",
            actions="a move in UCI notation, such as e2e4",
        )

    A problem is the seed for ``reset``. The server must give each session its own environment, and
    must allow as many sessions (``max_concurrent_envs``) as rollouts run concurrently. Override
    `describe` for other observations, and `action` for other actions.
    """

    url: Annotated[str, KEY_IN_HEADERS]
    """Address of the server; ``http://`` or ``https://``."""
    action_field: str = "message"
    """The field of the server's action that gets the answer. Empty: the answer must be a JSON
    object, which is the whole action."""
    action_options: dict[str, Any] = field(default_factory=dict)
    """Other fields of every action."""
    action_names: tuple[str, ...] = ()
    """Names of the numbers 0, 1, ..., if ``action_field`` is a number."""
    actions: str = ""
    """The text for ``{actions}`` in the templates: the possible actions. Empty: the
    ``action_names``."""
    reset_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``reset``, in addition to the seed."""
    headers: dict[str, str] = field(default_factory=dict)
    """HTTP headers, such as ``{"Authorization": "Bearer $HF_TOKEN"}``; ``$NAME`` stands for an
    environment variable."""
    connect_timeout_s: Annotated[float, Interval(ge=0.0, lt=1e6)] = 30.0
    """Seconds for which a rollout tries to connect while no server listens; below
    ``rollout.step_timeout_s``. So if the server is restarted, only its running games fail."""
    prompt: str = "{observation}"
    """The user's first message. Besides the usual fields, ``{info[NAME]}`` is a field of the
    observation, and ``{state[NAME]}`` is a field of the environment's state."""
    invalid_reply: str = "{error}"
    """The user's message after an answer that is no action; ``{error}`` says why."""
    replays: bool = False
    """Whether a game depends only on its seed and the actions. If so, a resumed run repeats the
    actions of an interrupted game and then continues the game; otherwise the rollout starts
    again."""

    def describe(self, observation: Mapping[str, Any]) -> str:
        """The text for ``{observation}`` in the templates: the observation's only field if that is
        a text, or else the observation as JSON."""
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        values = list(fields.values())
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
        return json.dumps(fields, ensure_ascii=False)

    def action(self, answer: str) -> Mapping[str, Any]:
        """Convert an answer to the argument of ``step``, or raise InvalidActionError."""
        if not self.action_field:
            try:
                found = json.loads(answer)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                raise InvalidActionError("That is no action: give a JSON object.")
            return {**self.action_options, **found}
        value: Any = answer
        if self.action_names:
            names = [name.casefold() for name in self.action_names]
            if answer.casefold() not in names:
                raise InvalidActionError(f"{answer[:_SHORT_CHARS]!r} is no action.")
            value = names.index(answer.casefold())
        return {**self.action_options, self.action_field: value}

    def name(self) -> str:
        return "openenv"  # without the address, which may be another one when a run is resumed

    def resume_identity(self) -> Mapping[str, Any]:
        return {"url": None, "connect_timeout_s": None}

    def game(self, seed: int) -> Game:
        return OpenEnvGame(self, seed)

    def errors(self) -> list[str]:
        return super().errors() + server_errors(self, "task", "url")


class OpenEnvGame:
    """A `Game`: one session with the server of ``task``, with its own environment."""

    def __init__(self, task: OpenEnvTask, seed: int) -> None:
        self._task = task
        self._seed = seed
        self._socket: Any = None
        self._needs_state = any("{state" in getattr(task, name) for name in TEXTS)

    async def reset(self) -> Mapping[str, Any]:
        """Connect to the server, and begin a game. Raises OpenEnvError: no server listens, the
        server has no room, its environment failed, or the connection was lost."""
        await self._connect()
        options = {**self._task.reset_options, "seed": self._seed}
        return await self._fields(await self._ask("reset", options))

    async def step(self, action: str) -> Move:
        """Perform an action; raises as `reset`, and InvalidActionError if the action does not fit
        the environment's schema."""
        result = await self._ask("step", self._task.action(action))
        fields = await self._fields(result)
        return Move(fields=fields, reward=fields["reward"], ended=bool(result.get("done")))

    async def close(self) -> None:
        """End the session; the server closes the environment. No effect without a connection."""
        if self._socket is None:
            return
        with contextlib.suppress(Exception):  # the connection may already be lost
            await self._socket.send(json.dumps({"type": "close"}))
        await self._socket.close()

    async def _fields(self, result: Mapping[str, Any]) -> Mapping[str, Any]:
        observation = result.get("observation") or {}
        return {
            "observation": self._task.describe(observation),
            "actions": self._task.actions or ", ".join(self._task.action_names),
            "reward": float(result.get("reward") or 0.0),
            "info": observation,
            "state": await self._ask("state") if self._needs_state else {},
        }

    async def _connect(self) -> None:
        """Connect. While no server listens, for it may be starting, retry for
        ``connect_timeout_s``."""
        client = require("websockets.asyncio.client", "websockets")
        address = "ws" + self._task.url.removeprefix("http").rstrip("/") + "/ws"
        headers = {name: os.path.expandvars(value) for name, value in self._task.headers.items()}
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._task.connect_timeout_s
        while self._socket is None:
            try:
                self._socket = await client.connect(
                    address, additional_headers=headers, max_size=_MAX_MESSAGE_BYTES
                )
            except Exception as error:  # from the network, the handshake, a proxy, ...
                if not _is_away(error) or loop.time() >= give_up_s:
                    raise self._error(f"cannot connect ({one_line(error)})") from error
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, kind: str, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        from websockets.exceptions import ConnectionClosed

        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with contextlib.suppress(ConnectionClosed):  # `recv` below may still read the reason
                await self._socket.send(json.dumps(message))
            answer = json.loads(await self._socket.recv())
        except Exception as error:
            raise self._error(f"{kind}: the connection was lost ({one_line(error)})") from error
        content: Mapping[str, Any] = answer["data"]
        if answer["type"] != "error":
            return content
        code, text = content.get("code"), str(content.get("message"))
        if code == "VALIDATION_ERROR":
            errors = content.get("errors") or [{"loc": (), "msg": text}]
            fields = (f"{'.'.join(map(str, e['loc'])) or 'action'}: {e['msg']}" for e in errors)
            raise InvalidActionError(f"That is no action ({'; '.join(fields)[:_LONG_CHARS]}).")
        if code == "CAPACITY_REACHED":
            text += "; start it with max_concurrent_envs for all rollouts that run concurrently"
        raise self._error(f"{kind}: {text} ({code})")

    def _error(self, cause: str) -> OpenEnvError:
        return OpenEnvError(f"OpenEnv server {self._task.url}: {cause}")


def _is_away(error: Exception) -> bool:
    """Whether no server listens, a proxy reaches none, or a server is just ending. If a host has
    several addresses, asyncio raises a plain OSError."""
    from websockets.exceptions import InvalidMessage, InvalidStatus

    if isinstance(error, InvalidStatus):  # from a proxy
        return error.response.status_code in (502, 503, 504)
    return isinstance(error, (ConnectionError, InvalidMessage)) or type(error) is OSError
