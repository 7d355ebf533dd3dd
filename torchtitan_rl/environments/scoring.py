"""Scores answers: compares them exactly, as numbers, as mathematics, or by your own function.

`extract` finds the answer in the policy's text, and `score_text` compares it in this process. A
function that computes with an answer may hang, crash or use up the memory, so `run_checker` calls
it in the sandbox, in a fork of a process that has imported the function's module and has never seen
a policy's text. Code in the answer may have forged its result, which is JSON, so `checked_score`
accepts only a number from 0 to 1.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

import regex

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.rollout.calls import in_thread
from torchtitan_rl.sandbox.sandbox import SandboxConfig, SandboxStatus, shared_sandbox

Comparison = Literal["exact", "number", "math"]

MATH_SCORE = "torchtitan_rl.environments.math_score:math_score"
_MAX_DIGITS = 4000
_SEARCH_S = 2.0  # CPU time
# After a digit or a bracket, a hyphen is a subtraction or a range, not the number's sign.
_NUMBER = re.compile(r"((?:(?<![\d)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+))(?:[eE]([+-]?\d+))?")
_MAX_RESULT_BYTES = 1 << 16
_CALL = """
import json, os, sys
answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what functions print is not the result
try:
    answer = json.dumps({"result": prepared(*json.load(sys.stdin))})
except Exception as error:
    answer = json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())[:1000]})
os.write(answers, answer.encode())
os._exit(0)
"""


class CheckTimeoutError(TorchtitanRLError):
    """A check took too long, or was killed by its limits."""


class CheckFailedError(TorchtitanRLError):
    """A check raised an error (the message describes it in one line), or its result is invalid."""


async def extract(pattern: str, text: str) -> str | None:
    """Find the `last_match` in a policy's text, in a thread that releases the interpreter's lock.
    Raises CheckTimeoutError: the search took more than 2 s of CPU time."""
    try:
        found: str | None = await in_thread(last_match, pattern, text, _SEARCH_S)
    except TimeoutError:
        raise CheckTimeoutError(f"{pattern!r:.100}: no end after {_SEARCH_S} s") from None
    return found


def last_match(pattern: str, text: str, timeout_s: float | None = None) -> str | None:
    """The last match of ``pattern`` (its first group, if it has one), or None; an empty pattern
    matches the whole text. TimeoutError: it took more than ``timeout_s`` of CPU time.

    >>> last_match(r"#### (.+)", "3 + 4 is 7, so\\n#### 7")
    '7'
    """
    if not pattern:
        return text.strip()
    found = None
    for match in regex.finditer(pattern, text, concurrent=True, timeout=timeout_s):
        found = match
    if found is None:
        return None
    return str(found.group(1 if found.re.groups else 0) or "").strip()


def score_text(comparison: Literal["exact", "number"], right: str, answer: str) -> float:
    """1 if the answer is right, else 0.

    ``exact`` compares the texts; ``number`` compares the last number of each, which may have
    thousands separators and an exponent:

    >>> score_text("number", "1,200", "They earn 1200.00 dollars.")
    1.0
    """
    if comparison == "exact":
        return float(right.strip() == answer.strip())
    expected = _last_number(right)
    return float(expected is not None and _last_number(answer) == expected)


def _last_number(text: str) -> Fraction | None:
    """The last number in a text, unless it has more than `_MAX_DIGITS` digits or a larger
    exponent."""
    numbers = _NUMBER.findall(text)
    if not numbers or max(map(len, numbers[-1])) > _MAX_DIGITS:
        return None
    digits, exponent = numbers[-1]
    power = int(exponent or 0)
    if abs(power) > _MAX_DIGITS:
        return None
    return Fraction(digits.replace(",", "")) * Fraction(10) ** power


async def run_checker(
    function: str,
    *args: Any,
    timeout_s: float,
    made: Sequence[Any] | None = None,
    sandbox: SandboxConfig | None = None,
) -> Any:
    """Call ``function`` ("package.module:name") in the sandbox, and return its result.

    Arguments and result are JSON. ``timeout_s`` limits only the call itself: waiting for a free
    process and importing the module do not count. With ``made``, ``function(*made)`` is first
    called outside of the sandbox and its limits, and must return a function, which is called with
    ``args`` in the sandbox. No part of ``made`` may come from a policy.

    Raises:
        CheckTimeoutError: the function took too long or too much memory, or killed its process.
        CheckFailedError: the function raised an error, or its result is not JSON.
        ConfigError: the module cannot be imported, or this machine does not allow the isolation.
        SandboxError: the function does not exist, or raised an error for ``made``.
    """
    config = checker_sandbox(function, sandbox)
    limits = replace(
        config.limits, wall_s=timeout_s, cpu_s=timeout_s, output_bytes=_MAX_RESULT_BYTES
    )
    result = await shared_sandbox(config).run(
        _CALL, stdin=json.dumps(args), limits=limits, prepared=(function, made)
    )
    if result.status not in (SandboxStatus.OK, SandboxStatus.ERROR):
        raise CheckTimeoutError(f"{function}: {result.status} within {timeout_s} s")
    try:
        answer = json.loads(result.stdout)
    except (ValueError, RecursionError):
        answer = None
    match answer:
        case {"result": value}:
            return value
        case {"error": str(error)}:
            raise CheckFailedError(f"{function}: {error:.1000}")
    words = result.stderr.strip().rpartition("\n")[2]
    raise CheckFailedError(
        f"{function}: its process ended ({result.exit_code}) without a result of at most "
        f"{_MAX_RESULT_BYTES} bytes; its last words: {words:.200}"
    )


def checker_sandbox(function: str, sandbox: SandboxConfig | None) -> SandboxConfig:
    """The sandbox in which `run_checker` calls ``function``."""
    sandbox = sandbox or SandboxConfig()
    return replace(sandbox, preload=(*sandbox.preload, function.partition(":")[0]))


def checked_score(score: object) -> float:
    """Return a result of `run_checker`; CheckFailedError: it is no number from 0 to 1."""
    if not isinstance(score, int | float) or not 0 <= score <= 1:
        raise CheckFailedError(f"{reprlib.repr(score)} is no score from 0 to 1")
    return float(score)
