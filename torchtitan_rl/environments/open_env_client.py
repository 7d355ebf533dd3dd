"""A session with an OpenEnv server, by its WebSocket protocol.

Not by the `openenv` package's client: that connects again, to a new environment, where it finds its
connection closed between two steps, so a rollout would go on in another game. Here a lost
connection is an error. The package is not needed either; its requirements contradict vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.data.rows import require
from torchtitan_rl.environments.games import InvalidActionError
from torchtitan_rl.errors import TorchtitanRLError, one_line

_MAX_MESSAGE_BYTES = 1 << 26
_SHORT_CHARS = 300
_PAUSE_S = 0.5  # between two tries to connect


class OpenEnvError(TorchtitanRLError):
    """A server cannot be reached, refused a request, or was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvResult:
    """What `reset` and `step` return."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class OpenEnvSession:
    """One environment of the server, from `connect` to `close`; one call at a time."""

    def __init__(
        self, url: str, headers: Mapping[str, str], *, connect_timeout_s: float = 0.0
    ) -> None:
        self._url = url
        self._connect_timeout_s = connect_timeout_s
        self._headers = {name: os.path.expandvars(value) for name, value in headers.items()}
        self._socket: Any = None

    async def connect(self) -> None:
        """Try again while no server listens: it may be starting.

        Raises:
            OpenEnvError: there is no such server, for ``connect_timeout_s``.
        """
        client = require("websockets.asyncio.client", "websockets")
        address = "ws" + self._url.removeprefix("http").rstrip("/") + "/ws"
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._connect_timeout_s
        while self._socket is None:
            try:
                self._socket = await client.connect(
                    address, additional_headers=self._headers, max_size=_MAX_MESSAGE_BYTES
                )
            except Exception as error:  # of the network, the handshake, a proxy, ...
                if not _is_away(error) or loop.time() >= give_up_s:
                    raise self._error(f"cannot connect ({one_line(error)})") from error
                await asyncio.sleep(_PAUSE_S)

    async def reset(self, options: Mapping[str, Any]) -> OpenEnvResult:
        """
        Raises:
            OpenEnvError: the server has no room, its environment failed, or it was lost.
        """
        return _result(await self._ask("reset", options))

    async def step(self, action: Mapping[str, Any]) -> OpenEnvResult:
        """
        Raises:
            InvalidActionError: the action does not fit the environment's schema.
            OpenEnvError: as for `reset`.
        """
        return _result(await self._ask("step", action))

    async def state(self) -> Mapping[str, Any]:
        """
        Raises:
            OpenEnvError: as for `reset`.
        """
        return await self._ask("state", None)

    async def close(self) -> None:
        """The server closes the environment. Harmless where there is no connection."""
        if self._socket is None:
            return
        with contextlib.suppress(Exception):  # the connection may be lost already
            await self._socket.send(json.dumps({"type": "close"}))
        await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        from websockets.exceptions import ConnectionClosed

        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with contextlib.suppress(ConnectionClosed):  # why may still be read
                await self._socket.send(json.dumps(message))
            answer = json.loads(await self._socket.recv())
        except Exception as error:
            raise self._error(f"{kind}: the connection was lost ({one_line(error)})") from error
        content: Mapping[str, Any] = answer["data"]
        if answer["type"] != "error":
            return content
        code, text = content.get("code"), str(content.get("message"))
        if code == "VALIDATION_ERROR":
            raise InvalidActionError(_validation_text(content))
        if code == "CAPACITY_REACHED":
            text += (
                "; start it with a max_concurrent_envs of at least rollout.groups_per_step x "
                "rollout.group_size and evaluation.num_problems"
            )
        raise self._error(f"{kind}: {text} ({code})")

    def _error(self, cause: str) -> OpenEnvError:
        return OpenEnvError(f"OpenEnv server {self._url}: {cause}")


def _result(content: Mapping[str, Any]) -> OpenEnvResult:
    reward = content.get("reward")
    return OpenEnvResult(
        observation=content.get("observation") or {},
        reward=None if reward is None else float(reward),
        done=bool(content.get("done")),
    )


def _validation_text(content: Mapping[str, Any]) -> str:
    """What is wrong with each field of the action."""
    errors = content.get("errors") or [{"loc": (), "msg": content.get("message")}]
    texts = [f"{'.'.join(map(str, one['loc'])) or 'action'}: {one['msg']}" for one in errors]
    return f"That is no action ({'; '.join(texts)[:_SHORT_CHARS]})."


def _is_away(error: Exception) -> bool:
    """No server listens, at none of the host's addresses (for which asyncio has a plain OSError)
    or behind a proxy, or one is just ending."""
    from websockets.exceptions import InvalidMessage, InvalidStatus

    if isinstance(error, InvalidStatus):  # of a proxy before it
        return error.response.status_code in (502, 503, 504)
    return isinstance(error, (ConnectionError, InvalidMessage)) or type(error) is OSError
