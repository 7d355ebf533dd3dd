"""Programs scored by tests: what passes, and what a policy could do to pass without solving."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from torchtitan_rl import Problem, SandboxConfig, SandboxLimits, TorchtitanRLError
from torchtitan_rl.experiments.code_tests.task import CodeTestsTask

SANDBOX = SandboxConfig(
    isolation="limits", limits=SandboxLimits(wall_s=60, cpu_s=0.3, output_bytes=1 << 20)
)
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", ["7", ""]]}
CALL = {"fn_name": "add", "inputs": [[1, 2], [[3], [4]]], "outputs": [3, [[3, 4]]]}


def task(**options: Any) -> CodeTestsTask:
    return CodeTestsTask(train=("unused.jsonl",), sandbox=SANDBOX, **options)


def problem(tests: Any) -> Problem:
    text = tests if isinstance(tests, str) else json.dumps(tests)
    messages = [{"role": "user", "content": "Add."}]
    return Problem(problem_id="p1", data={"messages": messages, "answer": text})


def rewards(tests: Any, answers: list[str], **options: Any) -> list[float]:
    async def score_all() -> list[float]:
        scored = task(**options)
        return [await scored.score(answer, problem(tests)) for answer in answers]

    return asyncio.run(score_all())


def block(code: str) -> str:
    return f"I think so.\n```python\n{code}\n```\nDone."


ADD = "a, b = map(int, input().split())\nprint(a + b)"


def test_the_last_program_must_print_the_right_words_of_every_test() -> None:
    right = [
        block(ADD),
        block("print(3)") + block(ADD),
        block("import sys\nprint(f' {sum(map(int, sys.stdin.read().split()))}  \\n')"),
        block(f"if __name__ == '__main__':\n    {ADD.replace(chr(10), chr(10) + '    ')}"),
    ]
    wrong = [
        ADD,  # no block
        "```python\n" + ADD,  # an unfinished one
        block("print(3)"),  # the first test only
        block(ADD) + block("print(3)"),
        block("print(3, 7)"),
        block("1 / 0"),
        block("(" * 10_000),
        block("while True: pass"),
        block("print('3' * (1 << 21))"),
        "```python\n" * 20_000,
    ]
    assert rewards(STDIN, right) == [1.0] * len(right)
    assert rewards(STDIN, wrong) == [0.0] * len(wrong)


def test_a_function_or_method_must_return_the_right_values() -> None:
    right = [
        block("def add(a, b):\n    return a + b"),
        block(
            "class Solution:\n    def add(self, a, b):\n        print('hm')\n        return a + b"
        ),
        block("from operator import add"),
    ]
    wrong = [
        block("def sum(a, b):\n    return a + b"),
        block("def add(a, b):\n    return 3"),
        block("def add(a, b):\n    return object()"),
        block("def add(a):\n    return a"),
    ]
    assert rewards(CALL, right) == [1.0] * len(right)
    assert rewards(CALL, wrong) == [0.0] * len(wrong)


def test_a_program_cannot_pass_by_what_it_does_to_the_test() -> None:
    forged = [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "class Right:\n    def __eq__(self, other):\n        return True\n"
        "def add(a, b):\n    return Right()",
        "import json\njson.dumps = lambda value: 'true'\ndef add(a, b):\n    return 0",
        "import builtins\nbuiltins.print = lambda *words: None\ndef add(a, b):\n    return a + b",
        "import json\njson.loads = lambda text: 1 / 0\ndef add(a, b):\n    return a + b",
        "import inspect\nfor frame in inspect.stack():\n    print(frame.frame.f_globals)\n"
        "    print(frame.frame.f_locals)\ndef add(a, b):\n    return None",
        "import gc\nprint([one for one in gc.get_objects() if isinstance(one, (list, dict))])\n"
        "def add(a, b):\n    return None",
    ]
    answers = [block(code) for code in forged]
    assert rewards(CALL, answers) == [0.0] * len(answers)
    assert rewards(STDIN, answers) == [0.0] * len(answers)


@pytest.mark.parametrize("code", ["import gc", "import sys"])
def test_a_program_finds_no_right_output_in_its_process(code: str) -> None:
    """The output is a number that is in no other place."""
    tests = {"inputs": ["1\n"], "outputs": ["731846255\n"]}
    looks = {
        "import gc": "print(*[s for o in gc.get_objects() for s in [repr(o)] if '7318462' in s])",
        "import sys": "print(*[w for w in sys.stdin.read().split() + sys.argv if '7318462' in w])",
    }
    assert rewards(tests, [block(f"{code}\n{looks[code]}")]) == [0.0]


def test_decimals_are_compared_up_to_rounding_and_whole_numbers_exactly() -> None:
    whole, decimal = (
        {"inputs": [""], "outputs": [text]} for text in ("10000000000000001", "0.333333333")
    )
    assert rewards(decimal, [block("print(1 / 3)"), block("print('x')")]) == [1.0, 0.0]
    assert rewards(whole, [block("print(10**16)"), block("print(10**16 + 1)")]) == [0.0, 1.0]


def test_the_tests_with_the_longest_inputs_decide() -> None:
    tests = {"inputs": ["1", "22", "333"], "outputs": ["x", "22", "333"]}
    answer = [block("print(input())")]
    assert rewards(tests, answer, max_tests=2) == [1.0]
    assert rewards(tests, answer, max_tests=3) == [0.0]


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "[" * 100_000,
        "['assert add(1, 2) == 3']",
        ["assert add(1, 2) == 3"],
        {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        {"inputs": [{"a": 1}], "outputs": [[1]]},
        {"fn_name": "add", "inputs": ["1"], "outputs": [1]},
    ],
)
def test_tests_of_another_form_are_an_error_of_the_problem(tests: Any) -> None:
    with pytest.raises(TorchtitanRLError, match="p1: its tests are no JSON object"):
        task().environment(problem(tests), tokenizer=None, limits=None)  # type: ignore[arg-type]


def test_wrong_fields_are_named() -> None:
    assert any("task.max_tests=0" in error for error in task(max_tests=0).errors())
