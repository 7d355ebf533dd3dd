"""``torchtitan-rl env check`` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_rl.commands import cli

CONFIG = """
from dataclasses import replace

from torchtitan_rl import Observation, Terminal, Task
from torchtitan_rl.configs.alphabet_sort_tiny import config as tiny


class Endless:
    replays = True

    async def reset(self):
        self.prompt = (5, 6)
        return Observation(prompt_token_ids=self.prompt)

    async def step(self, completion):
        self.prompt = (*self.prompt, *completion.token_ids, 7)
        return Observation(prompt_token_ids=self.prompt, max_tokens=1)

    async def finish(self, status):
        return Terminal(reward=0.5)

    async def close(self):
        pass


class EndlessTask(type(tiny.task)):
    def environment(self, problem, *, tokenizer, limits):
        return Endless()


config = replace(tiny, task=EndlessTask())
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "endless.py").write_text(CONFIG)
    return str(tmp_path / "endless.py")


def test_a_mistake_is_named_with_its_mend_and_ends_with_1(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["env", "check", config, "--problems", "2"]) == 1
    printed = capsys.readouterr()
    assert "max_turns, reward 0.5, 3 turns, 1 episode" in printed.out
    assert "resumed runs: rollouts are replayed" in printed.out
    (error, mend) = printed.err.splitlines()
    assert error.startswith("error: never-ends: check/alphabet_sort/train/")
    assert error.endswith("64 turns, and no end (and 1 more)")
    assert mend.startswith("  mend: return a Terminal from step")


def test_what_is_meant_so_is_allowed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "check", config, "--problems", "1", "--allow", "never-ends"]) == 0
    assert "allowed: never-ends: 64 turns, and no end\n" in capsys.readouterr().out


def test_a_game_that_the_script_cannot_play_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnasium")
    words = ["--problems", "1", "--rollout.sampling.max-tokens-per-turn", "16"]
    words += ["--max-block-ms", "60000"]
    assert cli.main(["env", "check", "frozen_lake_tiny", *words]) == 0
    printed = capsys.readouterr()
    assert "note: whether the environment ends by itself is not known: none of its" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "CONFIG is none: there is no such file"),
        (["calculator_agent_tiny"], "--policy is scripted: agents ask an endpoint"),
        (["alphabet_sort_tiny", "--problems", "9999"], "--problems is 9999: the train set has"),
        (["alphabet_sort_tiny", "--task.min-turns", "0"], "task.min_turns=0"),
        (["alphabet_sort_tiny", "--allow", "nothing"], "--allow"),
        (
            ["alphabet_sort_tiny", "--task.num-validation-problems", "64"],  # as `train` says it
            "evaluation.num_problems is 128: the validation set has 64 problems; give at most that",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["env", "check", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
