"""A request that the engine took, ran, and could not go on with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fast.generation.test_loop import WAIT_S, request, running_loop
from torchtitan_rl.errors import InvalidRequestError, RequestGivenUpError
from torchtitan_rl.generation.engine import EngineOutput
from torchtitan_rl.generation.scripted import ScriptedEngine


class ChokingEngine(ScriptedEngine):
    """Gives up every request whose id begins with "bad" where another would end."""

    def step(self) -> list[EngineOutput]:
        return [
            replace(output, refusal="no token is left")
            if output.request_id.startswith("bad")
            else output
            for output in super().step()
        ]


def test_it_fails_alone_and_its_id_can_be_used_again() -> None:
    with running_loop(ChokingEngine()) as loop:
        for _ in range(2):
            good = loop.submit(request("good", 20))
            bad = loop.submit(request("bad", 5))
            with pytest.raises(RequestGivenUpError, match="no token is left") as raised:
                bad.result(WAIT_S)
            assert len(raised.value.completion.token_ids) == 5
            assert isinstance(raised.value, InvalidRequestError)
            assert len(good.result(WAIT_S).token_ids) == 20
        assert loop.failure is None
