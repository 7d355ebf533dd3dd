"""Programming problems as a `Task`: the policy writes a program, and tests decide its reward.

A problem's tests are inputs with the right outputs, in the form of APPS and TACO (Li et al. 2023,
arXiv:2312.14852), which most datasets for RL on code share: a JSON object with ``inputs`` and
``outputs``. Without ``fn_name`` an input is the program's standard input, and an output is what it
must print. With ``fn_name`` an input is the list of arguments of that function (or method of the
program's class ``Solution``), and an output is what it must return.

Invariant: the program never sees a right output, and outputs are compared outside of the sandbox.
So a program cannot pass a test by ending early, or by changing what compares. Tests that are
Python code (``assert f(1) == 2``) would run in the program's own process, where it could change
their result, so they are not supported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl import (
    DataTask,
    Problem,
    RolloutConfig,
    SandboxConfig,
    SandboxLimits,
    SandboxStatus,
    TokenEnv,
    TorchtitanRLError,
    shared_sandbox,
)

_PROGRAM = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_PROMPT = """\
{problem}

Write a Python program that solves this problem. If the problem gives a function or class to \
complete, write that; otherwise read the input from stdin and write the output to stdout. Think \
step by step, then give the whole program in one block that begins with ```python."""
_CALL = """

def _call_tested():
    import json, sys
    arguments = json.loads(sys.stdin.read())
    names = globals()
    tested = names[{name!r}] if {name!r} in names else getattr(names["Solution"](), {name!r})
    result = tested(*arguments)
    print()
    print(json.dumps(result))

_call_tested()
"""


class TestsError(TorchtitanRLError):
    """A problem's tests have another form."""


@dataclass(frozen=True, kw_only=True)
class CodeTestsTask(DataTask):
    """Programming problems. The reward is 1 if the program passes its tests, and otherwise 0."""

    train: tuple[str, ...] = ("hf:agentica-org/DeepCoder-Preview-Dataset:taco:train",)
    prompt: str = _PROMPT
    answer: str = "{tests}"
    """The tests; a template like ``prompt``, whose text is JSON."""
    max_tests: int = 15
    """Number of tests that a program must pass: those with the longest inputs, as in DeepCoder."""
    sandbox: SandboxConfig = field(
        default_factory=lambda: SandboxConfig(
            limits=SandboxLimits(wall_s=12, cpu_s=6, memory_mb=1024, output_bytes=1 << 20)
        )
    )
    """Where the programs run; ``limits`` are those of one test."""

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        _parsed(problem)  # an error is shown before anything is generated
        return super().environment(problem, tokenizer=tokenizer, limits=limits)

    async def score(self, answer: str, problem: Problem) -> float:
        """Run the last program of ``answer`` on one test after the other, until one fails."""
        programs = _PROGRAM.findall(answer)
        if not programs:
            return 0.0
        name, tests = _parsed(problem)
        code = programs[-1] + (_CALL.format(name=name) if name else "")
        sandbox = shared_sandbox(self.sandbox)
        tests.sort(key=lambda test: -len(test[0]))
        for stdin, right in tests[: self.max_tests]:
            result = await sandbox.run(code, stdin=stdin)
            if result.status is not SandboxStatus.OK or result.is_truncated:
                return 0.0
            passes = _returned(result.stdout, right) if name else _printed(result.stdout, right)
            if not passes:
                return 0.0
        return 1.0

    def errors(self) -> list[str]:
        found = super().errors() + self.sandbox.errors("task.sandbox")
        if self.max_tests < 1:
            found.append(f"task.max_tests={self.max_tests}: must be 1 or more")
        return list(dict.fromkeys(found))


def _parsed(problem: Problem) -> tuple[str, list[tuple[str, Any]]]:
    """The function that is tested (empty: the whole program), and the tests: standard input, and
    the right output.

    Raises:
        TestsError: the problem has no tests in this form.
    """
    try:
        tests: Mapping[str, Any] = json.loads(problem.data["answer"])
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        if name := tests.get("fn_name"):
            if pairs and all(isinstance(arguments, list) for arguments, _ in pairs):
                return str(name), [(json.dumps(arguments), right) for arguments, right in pairs]
        elif pairs:
            return "", [(_text(stdin), _text(right)) for stdin, right in pairs]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise TestsError(
        f"{problem.problem_id}: its tests are no JSON object with the lists inputs and outputs; "
        "set task.answer"
    )


def _text(value: Any) -> str:
    """A text, which APPS sometimes has as a list of lines."""
    return value if isinstance(value, str) else "\n".join(value)


def _printed(stdout: str, right: str) -> bool:
    """Whether the words are equal; where the right one has a decimal point, up to rounding."""
    words, others = stdout.split(), right.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(word: str, right: str) -> bool:
    if word == right or "." not in right:
        return word == right
    try:
        return math.isclose(float(word), float(right), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def _returned(stdout: str, right: Any) -> bool:
    """Whether the last line is the right result in JSON. In APPS a result may be in a list."""
    try:
        result = json.loads(stdout.rstrip("\n").rpartition("\n")[2])
    except (ValueError, RecursionError):
        return False
    return bool(result == right or [result] == right)
