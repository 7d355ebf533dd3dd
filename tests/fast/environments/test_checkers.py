"""Functions in the sandbox: results, errors, limits, and what an answer can reach."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.async_tests import on_event_loop
from torchtitan_rl.environments.data_task import DataTask
from torchtitan_rl.environments.gym_datasets import GYM_SCORE
from torchtitan_rl.environments.reasoning_gym import ReasoningGymTask
from torchtitan_rl.environments.scoring import (
    MATH_SCORE,
    CheckFailedError,
    CheckTimeoutError,
    checked_score,
    checker_sandbox,
    run_checker,
)
from torchtitan_rl.sandbox.sandbox import Sandbox, SandboxConfig, SandboxError

HERE = __name__
pytestmark = pytest.mark.usefixtures("sandboxed")


def double(value):
    print("this is no answer")
    return 2 * value


def fail():
    raise ValueError("of\nno use")


def hang_in_c():
    """A regular expression that backtracks without end, and never lets another thread run."""
    import re

    re.match(r"(a+)+$", "a" * 50 + "b")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def eat_memory():
    return len(bytearray(1 << 40))


@on_event_loop
async def test_a_result_comes_back_whatever_the_function_prints():
    assert await run_checker(f"{HERE}:double", [1, "a"], timeout_s=5) == [1, "a", 1, "a"]


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        ("fail", CheckFailedError, "ValueError: of no use"),
        ("eat_memory", CheckFailedError, "MemoryError"),
        ("none", SandboxError, "has no attribute 'none'"),
    ],
)
def test_an_error_of_the_function_is_raised_in_one_line(
    function: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        asyncio.run(run_checker(f"{HERE}:{function}", timeout_s=5))


@pytest.mark.parametrize("function", ["hang_in_c", "die"])
def test_a_function_that_hangs_or_dies_is_a_timeout_and_the_next_call_works(function: str) -> None:
    with pytest.raises(CheckTimeoutError):
        asyncio.run(run_checker(f"{HERE}:{function}", timeout_s=0.5))
    assert asyncio.run(run_checker(f"{HERE}:double", 4, timeout_s=5)) == 8


def test_no_process_outlives_a_controller_that_was_killed() -> None:
    code = (
        "import asyncio\n"
        "from torchtitan_rl.environments.scoring import run_checker\n"
        "async def main():\n"
        f"    await run_checker('{HERE}:double', 1, timeout_s=5)\n"
        "    print('started', flush=True)\n"
        f"    await run_checker('{HERE}:hang_in_c', timeout_s=1)\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "started\n"
        children = psutil.Process(controller.pid).children()
        assert children
        controller.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


@pytest.mark.parametrize(
    ("function", "library"), [(MATH_SCORE, "math_verify"), (GYM_SCORE, "reasoning_gym")]
)
def test_what_a_score_needs_is_imported_before_its_time_begins(function: str, library: str) -> None:
    pytest.importorskip(library)

    async def imported() -> str:
        async with Sandbox(checker_sandbox(function, None)) as sandbox:
            return (await sandbox.run(f"import sys; print({library!r} in sys.modules)")).stdout

    assert asyncio.run(imported()) == "True\n"


@pytest.mark.parametrize(
    "make",
    [
        partial(ReasoningGymTask, tasks={"chain_sum": 1.0}),
        partial(DataTask, train=("unused",), compare="math"),
    ],
)
def test_a_task_without_its_sandbox_is_one_error_before_the_run(make: Callable[..., Any]) -> None:
    errors = make(sandbox=SandboxConfig(preload=("no_such_module",))).errors()
    wanted = "task.sandbox.preload: ModuleNotFoundError: No module named 'no_such_module'"
    assert [error for error in errors if "sandbox" in error] == [wanted]


def evaluate(text: str) -> object:
    """As scorers of libraries do with an answer."""
    return eval(text)


def check_of(*texts: str) -> list[object]:
    """The results one after another."""

    async def check() -> list[object]:
        return [await run_checker(f"{HERE}:evaluate", text, timeout_s=10) for text in texts]

    return asyncio.run(check())


ATTACKS = (
    "open({trace!r}, 'w').write('x')",
    "open({mine!r}).read()",
    "__import__('os').environ['TORCHTITAN_RL_ADMIN_KEY']",
    "open('/proc/1/environ').read().index('secret')",
    "open(f'/proc/{{__import__(\"os\").getppid()}}/environ').read().index('secret')",
    "__import__('socket').create_connection(('127.0.0.1', {port}))",
    "__import__('subprocess').run(['touch', {trace!r}], check=True)",
    "__import__('signal') and __import__('os').kill({pid}, 9)",
)


@on_event_loop
async def test_an_answer_reaches_no_file_no_key_no_network_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_RL_ADMIN_KEY", "secret")
    trace, mine = tmp_path / "trace", tmp_path / "mine"
    mine.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for attack in ATTACKS:
            text = attack.format(trace=str(trace), mine=str(mine), port=port, pid=os.getpid())
            with pytest.raises(CheckFailedError):
                await run_checker(f"{HERE}:evaluate", text, timeout_s=10)
    assert not trace.exists()


def test_what_an_answer_changes_in_its_process_is_not_there_for_the_next() -> None:
    patch = "setattr(__import__('builtins'), 'eval', lambda text: 1.0)"
    clear = "__import__('sys').modules.clear()"
    assert check_of(patch, clear, "0", "0", "0") == [None, None, 0, 0, 0]


WRITTEN = (
    "b'{}'",
    "b'1.0'",
    "b'[' * 60_000",
    "b'9' * 60_000",
    "b'\\x80\\x04cos\\nsystem\\n'",
    "b'{\"error\": ' + b'[' * 900 + b']' * 900 + b'}'",
    "b'{\"result\": ' + b'[' * 900 + b']' * 900 + b'}'",
)
FORGED = (
    *("2.0", "-1", "float('nan')", "'1.0'", "[1.0]", "'x' * 200_000", "{}"),
    *(f"(__import__('os').write(3, {text}), __import__('os')._exit(0))" for text in WRITTEN),
)


@on_event_loop
async def test_a_forged_result_is_no_score() -> None:
    for forged in FORGED:
        with pytest.raises(CheckFailedError):
            checked_score(await run_checker(f"{HERE}:evaluate", f"[{forged}][0]", timeout_s=10))
