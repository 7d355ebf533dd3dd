"""Scripted engines with steps on demand, or that give requests up, for tests of the engine loop."""

from __future__ import annotations

import threading
from dataclasses import replace

from tests.support.scripted import ScriptedEngine
from torchtitan_rl.types import GenerationRequest, SamplingParams

WAIT_S = 20.0


class SteppedEngine(ScriptedEngine):
    """A scripted engine whose steps wait for permission."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.permits = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)

    def step(self) -> list:
        self.asked.release()
        assert self.permits.acquire(timeout=WAIT_S)
        return super().step()

    def allow(self, steps: int) -> None:
        """Let ``steps`` steps run and wait until the loop asks for the one after."""
        for _ in range(steps):
            self.permits.release()
            assert self.asked.acquire(timeout=WAIT_S)


class GivingUpEngine(ScriptedEngine):
    """Gives up every request whose id begins with "bad" where another would end."""

    def step(self) -> list:
        return [
            replace(output, refusal="no token is left")
            if output.request_id.startswith("bad")
            else output
            for output in super().step()
        ]


def request(name: str, max_tokens: int = 4, *, prompt: tuple[int, ...] = (1, 2, 3)):
    return GenerationRequest(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens)
    )
