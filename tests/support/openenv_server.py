"""A number to guess, on an OpenEnv server: ``python -m tests.support.openenv_server PORT ROOM``.

A third argument is the ``X-Token`` that sessions must have.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from starlette.types import ASGIApp, Receive, Scope, Send

MOST_GUESSES = 4


class Guess(Action):
    number: int
    loudly: bool = False


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret = -1
        self._state = State()

    def reset(self, seed: int | None = None, highest: int = 9, **_: Any) -> Hint:
        self._secret = random.Random(seed).randint(0, highest)
        self._state = State(step_count=0)
        return Hint(hint=f"Guess a number from 0 to {highest}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        if action.number == 13:
            raise RuntimeError("bad luck")
        if action.number == 666:
            os._exit(1)
        if action.number == self._secret:
            return Hint(hint="Right.", reward=1.0, done=True)
        word = "more" if action.number < self._secret else "less"
        hint = f"{word.upper() if action.loudly else word}, please."
        return Hint(hint=hint, reward=0.0, done=self._state.step_count == MOST_GUESSES)

    @property
    def state(self) -> State:
        return self._state


class Guarded:
    """Accepts a session only with the header ``X-Token``."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and (b"x-token", self._token) not in scope["headers"]:
            await send({"type": "websocket.close"})
            return
        await self._app(scope, receive, send)


if __name__ == "__main__":
    room = int(sys.argv[2])
    app: ASGIApp = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=room)
    if len(sys.argv) > 3:
        app = Guarded(app, token=sys.argv[3])
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
