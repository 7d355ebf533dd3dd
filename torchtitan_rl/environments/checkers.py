"""Calls of functions that compute with what a policy wrote: each in the sandbox, in a process of
its own.

Scorers evaluate answers as Python, hang, crash or eat the memory. The process of a call is forked
from one that has imported the function's module and has never seen a policy's text. What it
returns is JSON, and may be forged: whoever uses it checks it (`checked_score`).
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.sandbox.sandbox import SandboxConfig, SandboxStatus, shared_sandbox

_MAX_TIMEOUT_S = 86400.0
_MAX_RESULT_BYTES = 1 << 16
_CALL = """
import json, os, sys
answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what functions print is no answer
try:
    answer = json.dumps({"result": prepared(*json.load(sys.stdin))})
except Exception as error:
    answer = json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())[:1000]})
os.write(answers, answer.encode())
os._exit(0)
"""


class CheckTimeoutError(TorchtitanRLError):
    """A call took too long, or its process died of it."""


class CheckFailedError(TorchtitanRLError):
    """What a function raised, in one line; or what it returned is no result."""


async def run_checker(
    function: str,
    *args: Any,
    timeout_s: float,
    made: Sequence[Any] | None = None,
    sandbox: SandboxConfig | None = None,
) -> Any:
    """The result of ``function`` ("package.module:name") in the sandbox.

    Arguments and result are JSON. At most ``timeout_s`` of the function itself: waiting for a free
    process and the import of the module do not count. With ``made``, ``function`` is first called
    with those arguments outside of the sandbox, unlimited, and ``args`` are for what it returns;
    no part of ``made`` may be a policy's.

    Raises:
        CheckTimeoutError: it took too long, too much memory, or killed its process.
        CheckFailedError: it raised an error, or returned no JSON.
        ConfigError: the module cannot be imported, or this machine does not allow the isolation.
        SandboxError: there is no such function, or ``function`` with ``made`` raised an error.
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
    """The sandbox that calls of ``function`` run in."""
    sandbox = sandbox or SandboxConfig()
    return replace(sandbox, preload=(*sandbox.preload, function.partition(":")[0]))


def checked_score(score: object) -> float:
    """A result of `run_checker` as a reward.

    Raises:
        CheckFailedError: it is no number from 0 to 1.
    """
    if not isinstance(score, int | float) or not 0 <= score <= 1:
        raise CheckFailedError(f"{reprlib.repr(score)} is no score from 0 to 1")
    return float(score)


def timeout_errors(timeout_s: float) -> list[str]:
    """Of a task's field ``check_timeout_s``."""
    if 0 < timeout_s <= _MAX_TIMEOUT_S:
        return []
    return [f"task.check_timeout_s={timeout_s}: must be above 0, and at most {_MAX_TIMEOUT_S:g}"]
