"""Snippets: what comes back, what is bounded, and what happens to them when something dies."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fast.sandbox.conftest import is_alive, wait_until
from tests.support.async_tests import cancel, on_event_loop
from torchtitan_rl.sandbox.sandbox import (
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxLimits,
    SandboxStatus,
)

# Code -> stdout, last line of stderr, exit code: as of Python itself.
PROGRAMS = {
    "a line of input": ("print(input() + '!')", "one!\n", "", 0),
    "all input": ("import sys; print(len(sys.stdin.read()))", "8\n", "", 0),
    "an exception": ("print(1); 1 / 0", "1\n", "ZeroDivisionError: division by zero", 1),
    "a wrong line": ("print(1", "", "SyntaxError: '(' was never closed", 1),
    "an exit": ("import sys; sys.exit()", "", "", 0),
    "an exit with a code": ("raise SystemExit(258)", "", "", 2),
    "an exit with a message": ("raise SystemExit('no')", "", "no", 1),
    "an exception after stdout is closed": (
        "import sys; sys.stdout.close(); assert False",
        "",
        "AssertionError",
        1,
    ),
    "an exception without stderr": (
        "import sys; sys.stderr = None; assert False",
        "",
        "AssertionError",
        1,
    ),
    "an exception after stderr is closed": ("import sys; sys.stderr.close(); 1 / 0", "", "", 1),
    "a thread that goes on": (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()",
        "late\n",
        "",
        0,
    ),
    "an exit function": ("import atexit; atexit.register(print, 'end')", "end\n", "", 0),
    "a pickle": (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
        "True\n",
        "",
        0,
    ),
    "a process": (
        "import subprocess; print(subprocess.run(['echo', 'hi'], capture_output=True).stdout)",
        "b'hi\\n'\n",
        "",
        0,
    ),
    "a folder of its own": (
        "open('f', 'w').write('x'); print(open('/tmp/f').read())",
        "x\n",
        "",
        0,
    ),
}


def test_a_snippet_runs_as_a_program(run):
    for what, (code, stdout, stderr, exit_code) in PROGRAMS.items():
        result = run(code, stdin="one\ntwo\n")
        assert (result.stdout, result.exit_code) == (stdout, exit_code), what
        assert result.stderr.strip().split("\n")[-1] == stderr, what
        assert result.status is (SandboxStatus.ERROR if exit_code else SandboxStatus.OK)
        assert 0 < result.cpu_s < result.wall_s + 1


# What programs usually do with files, threads and libraries; each prints what Python itself does.
EVERYDAY = {
    "copies": """
        import os, shutil
        os.makedirs("a/b")
        open("a/b/f", "w").write("x")
        shutil.copytree("a", "c")
        shutil.copy("a/b/f", "g")
        shutil.copy2("a/b/f", "h")
        shutil.move("c", "d")
        shutil.rmtree("a")
        print(open("d/b/f").read() + open("g").read() + open("h").read())
    """,
    "a database": """
        import sqlite3
        for name in ("f.db", ":memory:"):
            with sqlite3.connect(name) as db:
                db.execute("pragma journal_mode = wal")
                db.execute("create table t (x)")
                db.executemany("insert into t values (?)", [(i,) for i in range(100)])
            print(db.execute("select sum(x) from t").fetchone())
    """,
    "threads": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool: print(sum(pool.map(abs, range(100))))
    """,
    "mapped files": """
        import mmap, numpy
        numpy.save("a.npy", numpy.arange(1000))
        print(numpy.load("a.npy", mmap_mode="r+").sum())
        with open("a.npy", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped: print(mapped[1:6])
    """,
}
WITH_PROCESSES = {
    "pools": """
        import multiprocessing
        with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))
    """,
    "processes of an event loop": """
        import asyncio
        async def main():
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
            return await process.communicate(b"x")
        print(asyncio.run(main()))
    """,
    "programs": """
        import os, subprocess
        open("f", "w").write("#!/bin/sh\\ncp -p f g; ls -l g | cut -c1-10; sort -k1 f | tail -n 1")
        os.chmod("f", 0o700)
        print(subprocess.check_output("./f | head -n 1; timeout 9 echo x", shell=True))
    """,
}


def test_programs_do_the_same_as_without_a_sandbox(run, plain_results):
    for what, code in (EVERYDAY | WITH_PROCESSES).items():
        result = run(textwrap.dedent(code))
        assert (result.stdout, result.stderr) == plain_results[what]


def test_programs_of_one_process_also_do_without_namespaces(run_without_namespaces, plain_results):
    for what, code in EVERYDAY.items():
        result = run_without_namespaces(textwrap.dedent(code))
        assert (result.stdout, result.stderr) == plain_results[what]


@pytest.fixture(scope="session")
def plain_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What the programs write without a sandbox."""
    results = {}
    for what, code in (EVERYDAY | WITH_PROCESSES).items():
        command = [sys.executable, "-c", textwrap.dedent(code)]
        folder = tmp_path_factory.mktemp("plain")
        plain = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        results[what] = (plain.stdout, plain.stderr)
    return results


@on_event_loop
async def test_no_more_snippets_run_at_once_than_allowed_and_the_event_loop_goes_on():
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    async with Sandbox(SandboxConfig(concurrent=2)) as sandbox:
        code = "import time; print(time.monotonic()); time.sleep(0.5); print(time.monotonic())"
        results = await asyncio.gather(*(sandbox.run(code) for _ in range(6)))
    await cancel(ticking)
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    assert max(sum(a <= begin < b for a, b in spans) for begin, _ in spans) == 2
    assert ticks > 5


@on_event_loop
async def test_a_cancelled_run_leaves_nothing_and_the_next_one_works():
    async with Sandbox(SandboxConfig(concurrent=1)) as sandbox:
        waiting = asyncio.create_task(sandbox.run("import time; time.sleep(1000)"))
        root = psutil.Process(sandbox._zygote._process.pid)
        while len(root.children(recursive=True)) < 3:
            await asyncio.sleep(0.01)
        snippet = root.children(recursive=True)[-1]
        await cancel(waiting)
        assert not snippet.is_running() or snippet.status() == psutil.STATUS_ZOMBIE
        assert (await sandbox.run("print(1)")).stdout == "1\n"


@on_event_loop
async def test_a_killed_zygote_fails_its_snippets_and_is_replaced():
    async with Sandbox(SandboxConfig(concurrent=2)) as sandbox:
        waiting = asyncio.create_task(sandbox.run("import time; time.sleep(1000)"))
        root = psutil.Process(sandbox._zygote._process.pid)
        while len(root.children(recursive=True)) < 3:
            await asyncio.sleep(0.01)
        root.children()[0].kill()
        with pytest.raises(SandboxError, match="killed from outside"):
            await waiting
        assert (await sandbox.run("print(1)")).stdout == "1\n"


@pytest.mark.parametrize("isolation", ["namespaces", "landlock", "limits"])
@on_event_loop
async def test_a_snippet_whose_keeper_dies_was_killed_and_is_no_failure_of_the_sandbox(isolation):
    config = SandboxConfig(isolation=isolation)
    if errors := config.errors("sandbox"):
        pytest.skip(errors[0])
    depth = 2 if isolation == "namespaces" else 1  # from the zygote to keepers
    async with Sandbox(config) as sandbox:
        waiting = asyncio.create_task(sandbox.run("import time; time.sleep(1000)"))
        root = psutil.Process(sandbox._zygote._process.pid)
        while len(below := root.children(recursive=True)) <= depth:
            await asyncio.sleep(0.01)
        below[depth - 1].kill()
        result = await waiting
        assert (result.status, result.exit_code) == (SandboxStatus.KILLED, -9)
        assert wait_until(lambda: not is_alive(below[depth]))
        assert (await sandbox.run("print(1)")).stdout == "1\n"


@on_event_loop
async def test_modules_can_be_loaded_in_advance_and_more_paths_shown(shown_file):
    config = SandboxConfig(readable=(str(shown_file.parent),), preload=("decimal",))
    async with Sandbox(config) as sandbox:
        code = f"import sys; print('decimal' in sys.modules, open('{shown_file}').read())"
        assert (await sandbox.run(code)).stdout == "True a,b\n"
        assert "Read-only" in (await sandbox.run(f"open('{shown_file}', 'a')")).stderr


@pytest.fixture
def shown_file() -> Iterator[Path]:
    """A file that any user may write, and not in /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        file = Path(folder, "table.csv")
        file.write_text("a,b")
        os.chmod(file, 0o666)
        yield file


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"preload": ("no_such_module",)}, "No module named 'no_such_module'"),
        ({"readable": ("/no/such/folder",)}, "task.sandbox.readable: there is no /no/such/folder"),
        ({"readable": ("/tmp",)}, "/tmp would be hidden by the /tmp that each snippet has"),
    ],
)
def test_a_configuration_that_cannot_be_met_says_why(options, error):
    (found,) = SandboxConfig(**options).errors("task.sandbox")
    assert error in found


def test_a_machine_without_user_namespaces_is_refused_unless_less_is_asked_for_by_name():
    program = """
        import asyncio
        from torchtitan_rl import ConfigError
        from torchtitan_rl.sandbox.sandbox import Sandbox, SandboxConfig
        try:
            asyncio.run(Sandbox().run("print(1)"))
        except ConfigError as error:
            print(error)
        print(SandboxConfig(isolation="limits").errors("task.sandbox"))
    """
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" -c "$1"'
    argv = ["unshare", "-Ur", "sh", "-c", forbid, sys.executable, textwrap.dedent(program)]
    refused, allowed = subprocess.run(argv, capture_output=True, text=True).stdout.splitlines()
    assert "unshare: No space left on device" in refused
    assert "isolation 'landlock' does without them" in refused
    assert allowed == "[]"


# Without namespaces: how to use up the machine, and what comes of it.
LIMITED = {
    "a loop": ("while True: pass", "cpu"),
    "a sleep": ("import time; time.sleep(1000)", "timeout"),
    "memory": ("x = bytearray(2 << 30)", "error"),
    "a process": ("import os; os.fork()", "error"),
    "a socket": ("import socket; socket.socket()", "error"),
    "a signal to its keeper": ("import os; os.kill(os.getppid(), 9)", "error"),
    "a large file": ("open('f', 'wb').truncate(1 << 30)", "error"),
    "a thread": (
        "import threading; t = threading.Thread(target=print, args=(1,)); t.start(); t.join()",
        "ok",
    ),
}


def test_without_namespaces_there_are_limits(run_without_namespaces):
    for what, (code, status) in LIMITED.items():
        limits = SandboxLimits(wall_s=0.3 if status == "timeout" else 60, cpu_s=0.3)
        assert run_without_namespaces(code, limits=limits).status == SandboxStatus(status), what
