"""Environments of OpenEnv servers, as a `Task`: each rollout has a session of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.environments.game_task import TEXTS, GameTask
from torchtitan_rl.environments.games import Game, InvalidActionError, Move
from torchtitan_rl.environments.open_env_client import OpenEnvResult, OpenEnvSession
from torchtitan_rl.errors import one_line

_HEALTH_TIMEOUT_S = 10.0
_SHORT_CHARS = 60


@dataclass(frozen=True, kw_only=True)
class OpenEnvTask(GameTask):
    """An environment of an OpenEnv server that runs::

        OpenEnvTask(
            url="http://127.0.0.1:8000",
            action_field="move",
            actions="a move in UCI notation, such as e2e4",
        )

    A problem is the seed that ``reset`` is called with. The server must give each session an
    environment of its own, and have room for all rollouts that run at once
    (``max_concurrent_envs``). Override `describe` for other observations, `action` for other
    actions.
    """

    url: str
    """Of the server; ``http://`` or ``https://``."""
    action_field: str = "message"
    """The field of the server's action that gets the answer. Empty: the answer is a JSON object,
    the whole action."""
    action_options: dict[str, Any] = field(default_factory=dict)
    """Other fields of every action."""
    action_names: tuple[str, ...] = ()
    """Names of the numbers 0, 1, ..., where ``action_field`` is a number."""
    actions: str = ""
    """``{actions}`` of the templates: what can be chosen. Empty: ``action_names``."""
    reset_options: dict[str, Any] = field(default_factory=dict)
    """What ``reset`` is called with, besides the seed."""
    headers: dict[str, str] = field(default_factory=dict)
    """HTTP headers, such as ``{"Authorization": "Bearer $HF_TOKEN"}``; ``$NAME`` stands for an
    environment variable."""
    connect_timeout_s: float = 30.0
    """Seconds for which a rollout tries to connect while no server listens, so that one that is
    started again costs only the games that it had; below ``rollout.step_timeout_s``."""
    prompt: str = "{observation}"
    """The user's first message. Besides the usual fields, ``{info[NAME]}`` is a field of the
    observation, ``{state[NAME]}`` one of the environment's state."""
    invalid_reply: str = "{error}"
    """The user's message after an answer that is no action; ``{error}`` says why."""
    replays: bool = False
    """Whether a game depends on nothing but its seed and the actions, so that a resumed run can
    play it again to where it was; otherwise such rollouts start again."""

    def describe(self, observation: Mapping[str, Any]) -> str:
        """``{observation}`` of the templates: the only field if that is a text, else JSON."""
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        values = list(fields.values())
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
        return json.dumps(fields, ensure_ascii=False)

    def action(self, answer: str) -> Mapping[str, Any]:
        """What ``step`` is called with.

        Raises:
            InvalidActionError: the answer is no action.
        """
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
        return "openenv"  # not the address, which a resumed run may find elsewhere

    def resume_identity(self) -> Mapping[str, Any]:
        return {"url": None, "connect_timeout_s": None}

    def game(self, seed: int) -> Game:
        return OpenEnvGame(self, seed)

    def errors(self) -> list[str]:
        found = super().errors()
        if not 0 <= self.connect_timeout_s < 1e6:
            found.append(
                f"task.connect_timeout_s={self.connect_timeout_s}: must be at least 0, and below a "
                "million"
            )
        if not self.url.startswith(("http://", "https://")):
            return [*found, f"task.url={self.url!r}: must begin with http:// or https://"]
        import httpx

        try:
            httpx.get(f"{self.url.rstrip('/')}/health", timeout=_HEALTH_TIMEOUT_S)
        except httpx.HTTPError as error:
            found.append(
                f"task.url={self.url!r}: no server answers ({one_line(error)}); "
                "start it before the run"
            )
        return found


class OpenEnvGame:
    """A `Game`: a session with the server of ``task``."""

    def __init__(self, task: OpenEnvTask, seed: int) -> None:
        self._task = task
        self._seed = seed
        self._session = OpenEnvSession(
            task.url, task.headers, connect_timeout_s=task.connect_timeout_s
        )
        self._needs_state = any("{state" in getattr(task, name) for name in TEXTS)

    async def reset(self) -> Mapping[str, Any]:
        await self._session.connect()
        options = {**self._task.reset_options, "seed": self._seed}
        return await self._fields(await self._session.reset(options))

    async def step(self, action: str) -> Move:
        result = await self._session.step(self._task.action(action))
        return Move(
            fields=await self._fields(result), reward=result.reward or 0.0, ended=result.done
        )

    async def close(self) -> None:
        await self._session.close()

    async def _fields(self, result: OpenEnvResult) -> Mapping[str, Any]:
        return {
            "observation": self._task.describe(result.observation),
            "actions": self._task.actions or ", ".join(self._task.action_names),
            "reward": result.reward or 0.0,
            "info": result.observation,
            "state": await self._session.state() if self._needs_state else {},
        }
