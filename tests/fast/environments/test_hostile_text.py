"""What reads a policy's text on the event loop, given texts so long that no quadratic reader would
end before the test's time limit: each returns, or says that the text is none of its kind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.support.async_tests import on_event_loop
from torchtitan_rl.environments.data_task import DataTask
from torchtitan_rl.environments.games import InvalidActionError
from torchtitan_rl.environments.judge import Judge, JudgeConfig
from torchtitan_rl.environments.open_env import OpenEnvTask
from torchtitan_rl.environments.question import QuestionEnv, ToolAnswer, ToolEnv
from torchtitan_rl.environments.scoring import CheckTimeoutError, extract
from torchtitan_rl.experiments.alphabet_sort.env import score as alphabet_score
from torchtitan_rl.experiments.calculator_agent.agent import Solution
from torchtitan_rl.experiments.calculator_agent.calculator import CalculatorError, calculate
from torchtitan_rl.experiments.calculator_agent.task import is_right
from torchtitan_rl.experiments.code_interpreter.task import score as program_score
from torchtitan_rl.experiments.search.env import is_right as is_found
from torchtitan_rl.types import Problem

SIZE = 1_000_000
PIECES = {
    "answer tags": "<answer>",
    "closed answer tags": "<answer></answer>",
    "score": "score ",
    "white space": " ",
    "lines": "a\n",
    "digits": "9",
    "thousands": "1,",
    "points": "1.",
    "signs": "-",
    "exponents": "1e9",
    "brackets": "[",
    "braces": '{"a":',
    "list": "1,",
    "nul": "\0",
    "two bytes": "İ",
}
TEXTS = {name: (piece * SIZE)[:SIZE] for name, piece in PIECES.items()} | {
    "exponent": "1e999999999",
    "long number": "1" * 4000 + "e4000",
    "nested list": "[" * 400_000 + "]" * 400_000,
    "nested list that Python reads": "[" * 900 + "]" * 900,
    "long list": "[" + "1," * (SIZE // 2) + "1]",
}
PROBLEM = Problem(problem_id="p", data={"answer": "7"})
DATA = DataTask(train=("none",))


class Echo:
    """A tool that must not get what it cannot write as JSON."""

    async def open(self) -> list[Any]:
        return []

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        return ToolAnswer(text=str(arguments))

    async def close(self) -> None:
        """There is nothing to release."""


async def is_seven(answer: str) -> float:
    return float(answer == "7")


def answered(task: DataTask) -> Callable[[str], Awaitable[Any]]:
    env = QuestionEnv([], partial(task.score, problem=PROBLEM))
    return lambda text: env.step({"content": text})


def called(arguments: str) -> Awaitable[Any]:
    call = {"type": "function", "function": {"name": "echo", "arguments": arguments}}
    return ToolEnv([], Echo(), is_seven).step(
        {"tool_calls": [call], "invalid_tool_calls": [arguments]}
    )


READERS: dict[str, Callable[[str], Any]] = {
    "extract": partial(extract, r"(?s)<answer>(.*?)</answer>"),
    "exact": answered(DATA),
    "number": answered(replace(DATA, compare="number")),
    "judge": lambda text: Judge(JudgeConfig())._read(text),
    "openenv": OpenEnvTask(url="http://127.0.0.1:1", action_field="").action,
    "tools": called,
    "tool arguments": lambda text: called(f'{{"a": {text}}}'),
    "alphabet_sort": lambda text: alphabet_score(text, [["a", "b"]] * 3, 2, power=2.0),
    "calculator": calculate,
    "calculator's answer": lambda text: is_right(
        Solution(answer=text, num_calls=0, results=()), right_answer=7
    ),
    "code_interpreter": lambda text: program_score(text, "7"),
    "search": lambda text: is_found(text, "cheese"),
}


async def read(reader: Callable[[str], Any], text: str) -> None:
    with contextlib.suppress(InvalidActionError, CheckTimeoutError, CalculatorError):
        result = reader(text)
        if asyncio.iscoroutine(result):
            await result


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", READERS)
def test_no_text_of_a_policy_stops_what_reads_it(name: str) -> None:
    for text in TEXTS.values():
        asyncio.run(read(READERS[name], text))


@pytest.mark.timeout(120)
def test_no_action_stops_a_space_that_reads_it() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    from torchtitan_rl.environments.gymnasium_task import read_action

    box, few = spaces.Box(-1, 1, (2,)), spaces.Discrete(3)
    for space in (
        *(few, box, spaces.MultiDiscrete([3, 3]), spaces.MultiBinary(4), spaces.Text(SIZE)),
        *(spaces.Tuple((few, box)), spaces.Dict({"a": few}), spaces.OneOf((few, box))),
        *(spaces.Sequence(few), spaces.Sequence(box, stack=True), spaces.Graph(box, few)),
    ):
        for text in TEXTS.values():
            asyncio.run(read(partial(read_action, space, ()), text))


@on_event_loop
async def test_a_search_that_takes_long_leaves_the_event_loop_free() -> None:
    searching = asyncio.ensure_future(extract(r"(?:x+x+)+y", "x" * SIZE))
    turns = 0
    while not searching.done():
        await asyncio.sleep(0.01)
        turns += 1
    with pytest.raises(CheckTimeoutError):
        searching.result()
    assert turns > 10
