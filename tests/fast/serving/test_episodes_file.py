"""The episodes file, also on a full disk and after a kill."""

from __future__ import annotations

import json

import pytest

from tests.fast.test_files import files_of_at_most
from tests.support.agents import asked
from tests.support.served_sessions import make
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.report import EpisodesFile


def test_each_episode_is_a_line_with_its_session_its_reward_and_its_temperature(tmp_path):
    path = tmp_path / "episodes.jsonl"

    async def scenario():
        with EpisodesFile(path) as file:
            sessions = make(keep=file.write)
            await sessions.complete(asked((1, 2), "s", max_tokens=2))
            hot = asked((1, 2, 99), "s", max_tokens=3, temperature=1.5)
            await sessions.complete(hot)
            sessions.reward_branch("s", -0.5, response_id=hot.request_id)
            await sessions.complete(asked((5,), "unrewarded", max_tokens=1))
            await sessions.close("unrewarded")
            return await sessions.close("s", 0.5)

    report = run_virtually(scenario())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["token_ids"] for line in lines] == [list(e.token_ids) for e in report.episodes]
    assert len(lines) == 2
    assert [line["session_id"] for line in lines] == ["s", "s"]
    assert sorted((line["reward"], line["temperatures"]) for line in lines) == [
        (-0.5, [1.5]),
        (0.5, [1.0]),
    ]


def test_a_full_disk_loses_no_session_and_leaves_no_half_line(tmp_path):
    path = tmp_path / "episodes.jsonl"

    async def scenario():
        with EpisodesFile(path) as file:
            sessions = make(keep=file.write)
            for name in ("first", "second"):
                await sessions.complete(asked((1, 2), name, max_tokens=4))
            await sessions.close("first", 1.0)
            room = path.stat().st_size + 10
            with files_of_at_most(room), pytest.raises(RefusedError) as error:
                await sessions.close("second", 1.0)
            assert error.value.code == "episodes_not_written"
            assert path.stat().st_size == room - 10
            assert sessions.counts()["sessions_open"] == 1
            return await sessions.close("second", 1.0)

    report = run_virtually(scenario())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["session_id"] for line in lines] == ["first", "second"]
    assert lines[1]["token_ids"] == list(report.episodes[0].token_ids)
