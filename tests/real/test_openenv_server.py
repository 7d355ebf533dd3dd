"""Games of a real OpenEnv server, made with the package's own classes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.support.servers import served
from torchtitan_rl.environments.games import InvalidActionError, Move
from torchtitan_rl.environments.open_env import OpenEnvError, OpenEnvTask

pytest.importorskip("openenv")
SERVER = "tests.support.openenv_server"
ROOM = 8


@pytest.fixture(scope="module")
def task() -> Iterator[OpenEnvTask]:
    with served(SERVER, str(ROOM)) as port:
        yield OpenEnvTask(url=f"http://127.0.0.1:{port}", action_field="number")


def play(task: OpenEnvTask, seed: int, *actions: str) -> tuple[Mapping[str, Any], list[Move]]:
    """The fields of the first observation, and what came of each action."""

    async def rollout() -> tuple[Mapping[str, Any], list[Move]]:
        game = task.game(seed)
        try:
            first = await game.reset()
            return first, [await game.step(action) for action in actions]
        finally:
            await game.close()

    return asyncio.run(rollout())


def test_a_game_is_played_to_its_end(task: OpenEnvTask) -> None:
    assert task.errors() == []
    first, moves = play(task, 3, "9", "0", "3")
    assert first["observation"] == "Guess a number from 0 to 9."
    hints = [(move.fields["observation"], move.reward, move.ended) for move in moves]
    assert hints == [("less, please.", 0, False), ("more, please.", 0, False), ("Right.", 1, True)]


def test_the_seed_decides_the_game_and_options_reach_the_server(task: OpenEnvTask) -> None:
    loud = replace(
        task,
        reset_options={"highest": 0},
        action_options={"loudly": True},
        prompt="{observation} {info[hint]} {state[step_count]}",
    )
    first, moves = play(loud, 1, "5", "0")
    assert first["observation"] == first["info"]["hint"] == "Guess a number from 0 to 0."
    assert first["state"]["step_count"] == 0
    assert [move.fields["observation"] for move in moves] == ["LESS, please.", "Right."]
    assert moves[1].fields["state"]["step_count"] == 2


def test_what_the_schema_refuses_is_no_action_and_the_game_goes_on(task: OpenEnvTask) -> None:
    async def rollout() -> Move:
        game = task.game(3)
        await game.reset()
        with pytest.raises(InvalidActionError, match=r"That is no action \(number: Input should"):
            await game.step("three")
        move = await game.step("3")
        await game.close()
        return move

    assert asyncio.run(rollout()).ended


@pytest.mark.parametrize(
    ("changes", "answer", "action"),
    [
        ({"action_names": ("zero", "one")}, "One", {"number": 1}),
        ({"action_field": "", "action_options": {"a": 1}}, '{"b": 2}', {"a": 1, "b": 2}),
        ({"action_names": ("zero", "one")}, "two", None),
        ({"action_field": ""}, "[1]", None),
        ({"action_field": ""}, "{", None),
    ],
)
def test_answers_become_actions(
    changes: dict[str, Any], answer: str, action: dict[str, Any] | None
) -> None:
    task = replace(OpenEnvTask(url="http://a", action_field="number"), **changes)
    if action is None:
        with pytest.raises(InvalidActionError):
            task.action(answer)
    else:
        assert task.action(answer) == action


def test_each_rollout_has_its_own_game_until_the_server_is_full(task: OpenEnvTask) -> None:
    async def rollouts() -> None:
        games = [task.game(seed) for seed in range(ROOM)]
        await asyncio.gather(*(game.reset() for game in games))
        late = task.game(9)
        with pytest.raises(OpenEnvError, match="start it with max_concurrent_envs"):
            await late.reset()
        await asyncio.gather(late.close(), *(game.close() for game in games))

    asyncio.run(rollouts())
    assert play(task, 3, "3")[1][0].ended  # there is room again


def test_headers_reach_the_server(task: OpenEnvTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBER", "17")
    with served(SERVER, str(ROOM), "key-17") as port:
        there = replace(task, url=f"http://127.0.0.1:{port}", headers={"X-Token": "key-$NUMBER"})
        assert play(there, 3, "3")[1][0].ended
        with pytest.raises(OpenEnvError, match=r"cannot connect .*403"):
            play(replace(there, headers={}), 3, "3")


def test_a_rollout_waits_for_a_server_that_starts_again(task: OpenEnvTask) -> None:
    async def rollout() -> Move:
        def end(_: object, writer: asyncio.StreamWriter) -> None:
            writer.close()

        ending = await asyncio.start_server(end, "127.0.0.1", 0)
        port = ending.sockets[0].getsockname()[1]
        there = replace(task, url=f"http://127.0.0.1:{port}", connect_timeout_s=20)
        game = there.game(3)
        begun = asyncio.create_task(game.reset())
        await asyncio.sleep(0.2)
        ending.close()
        await asyncio.sleep(0.5)  # no server listens now
        with served(SERVER, str(ROOM), port=port):
            await begun
            move = await game.step("3")
            await game.close()
        return move

    assert asyncio.run(rollout()).ended


def test_errors_of_the_environment_and_a_lost_server_are_one_error(task: OpenEnvTask) -> None:
    with pytest.raises(OpenEnvError, match=r"^OpenEnv server http://127.*: step: bad luck \(EXECU"):
        play(task, 3, "13")

    async def rollouts() -> None:
        with served(SERVER, str(ROOM)) as port:
            there = replace(task, url=f"http://127.0.0.1:{port}", connect_timeout_s=0)
            crashing, waiting = there.game(1), there.game(2)
            await asyncio.gather(crashing.reset(), waiting.reset())
            for game, guess in ((crashing, "666"), (waiting, "1")):
                with pytest.raises(OpenEnvError, match="step: the connection was lost"):
                    await game.step(guess)
                await game.close()
        with pytest.raises(OpenEnvError, match="cannot connect"):
            await there.game(1).reset()
        (error,) = there.errors()
        assert error.startswith(f"task.url='{there.url}': no server answers (ConnectError: ")

    asyncio.run(rollouts())
