"""Functions in processes: results, errors, time limits, and what a killed process leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.async_tests import on_event_loop
from torchtitan_rl.environments.checkers import CheckFailedError, CheckTimeoutError, run_checker
from torchtitan_rl.environments.gym_datasets import GYM_SCORE
from torchtitan_rl.environments.scoring import MATH_SCORE

HERE = __name__


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


@on_event_loop
async def test_many_calls_share_the_processes():
    calls = (run_checker(f"{HERE}:double", number, timeout_s=60) for number in range(50))
    assert await asyncio.gather(*calls) == [2 * number for number in range(50)]


@pytest.mark.parametrize(
    ("function", "message"),
    [("fail", "ValueError: of no use"), ("none", "has no attribute 'none'")],
)
def test_an_error_of_the_function_is_raised_in_one_line(function: str, message: str) -> None:
    with pytest.raises(CheckFailedError, match=message):
        asyncio.run(run_checker(f"{HERE}:{function}", timeout_s=5))


@pytest.mark.parametrize("function", ["hang_in_c", "die", "eat_memory"])
def test_a_function_that_hangs_or_dies_is_a_timeout_and_the_next_call_works(function: str) -> None:
    with pytest.raises(CheckTimeoutError):
        asyncio.run(run_checker(f"{HERE}:{function}", timeout_s=0.5))
    assert asyncio.run(run_checker(f"{HERE}:double", 4, timeout_s=5)) == 8


def test_no_process_outlives_a_controller_that_was_killed() -> None:
    code = (
        "import asyncio\n"
        "from torchtitan_rl.environments.checkers import run_checker\n"
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
    code = "import sys; from torchtitan_rl.environments.checker_process import _load"
    check = f"{code}; _load({function!r}); assert {library!r} in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
