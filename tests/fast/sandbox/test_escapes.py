"""What snippets try and do not achieve: to reach the machine, use it up, outlive their run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from tests.fast.sandbox.conftest import NOT_ROOT, USERS, is_alive, wait_until
from torchtitan_rl.sandbox import kernel
from torchtitan_rl.sandbox.sandbox import SandboxConfig, SandboxLimits, SandboxStatus

# Each prints "refused" where it must not succeed.
REFUSED = {
    "a file of the machine": "open('/etc/shadow')",
    "a file of its user": f"open({__file__!r})",
    "a path out of the root": "open('/proc/1/root/etc/passwd')",
    "the keeper's memory": "open('/proc/1/mem', 'rb')",
    "the keeper's descriptors": "os.listdir('/proc/1/fd')",
    "the keeper's environment": "open('/proc/1/environ', 'rb').read()",
    "the machine's settings": "open('/proc/sys/kernel/core_pattern', 'w')",
    "the machine's devices": "os.listdir('/sys')",
    "a disk": "os.mknod('/tmp/disk', 0o060600, os.makedev(254, 0))",
    "Python's files": "open(os.__file__, 'a')",
    "a file in the root": "open('/file', 'w')",
    "the system's programs": "os.remove('/usr/bin/env')",
    "another user": "os.setuid(0)",
    "a socket": "__import__('socket').create_connection(('127.0.0.1', 80))",
    "a socket of the machine": "__import__('socket').socket(__import__('socket').AF_UNIX)",
    "a message to a socket by its address": (
        "__import__('socket').socketpair(1, 2)[0].sendto(b'x', '/run/systemd/journal/socket')"
    ),
    "a signal by a pipe": "__import__('fcntl').fcntl(1, 8, 1)",
    "a new user namespace": "check(libc.unshare(0x10000000))",
    "a child in new namespaces": "check(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))",
    "a mount": "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
    "leaving the root": "os.chroot('/tmp')",
    "tracing the keeper": "check(libc.ptrace(16, 1, 0, 0))",
    "reading another's memory": "check(libc.process_vm_readv(1, None, 0, None, 0, 0))",
    "a user's keys": "check(libc.syscall(248, b'user', b'k', b'v', 1, -3))",
    "memory without a file": "os.memfd_create('m')",
    "shared memory without a file": "check(libc.shmget(0, 4096, 0o1600))",
    "huge pages, which stay in use when hardly any is mapped": "check(libc.prctl(41, 0, 0, 0, 0))",
    "a queue of messages": "check(libc.msgget(0, 0o1600))",
    "a named queue of messages": "check(libc.mq_open(b'/q', 0o102, 0o600, None))",
    "semaphores": "check(libc.semget(0, 1, 0o1600))",
    "watching files": "check(libc.inotify_init1(0))",
    "a thread with descriptors of its own": "check(libc.syscall(56, 0x10900, 0, 0, 0, 0))",
    "many timers": (
        "[check(libc.timer_create(1, None, ctypes.byref(ctypes.c_long()))) for _ in range(5000)]"
    ),
    "asynchronous calls around the filter": "check(libc.syscall(425, 8, None))",
    "a higher limit": "__import__('resource').setrlimit(7, (10**6, 10**6))",
    "a huge file": "open('f', 'wb').truncate(1 << 40)",
    "more than the room": "[open(f'{i}', 'wb').write(bytes(8 << 20)) for i in range(8)]",
    "filling /dev/shm": "[open(f'/dev/shm/{i}', 'wb').write(bytes(8 << 20)) for i in range(8)]",
    "many files": "[os.mkdir(str(i)) for i in range(1000)]",
    "many descriptors": "[os.dup(1) for i in range(1000)]",
    "much memory": "bytearray(2 << 30)",
    "many threads": "[__import__('_thread').start_new_thread(time.sleep, (9,)) for i in range(99)]",
}
ATTEMPT = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
try:
    {code}
except (OSError, MemoryError, RuntimeError, ValueError):
    print("refused")
"""


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("isolation", ["namespaces", "landlock"])
def test_it_is_refused(isolation, user, sandboxes):
    run, refused = sandboxes(isolation, user), dict(REFUSED)
    if isolation == "landlock":
        del refused["more than the room"], refused["many files"]  # which stop it, see test_attacks
        keeper = f"/proc/{os.getpid()}/"
        refused = {what: code.replace("/proc/1/", keeper) for what, code in refused.items()}
    results = {what: run(ATTEMPT.format(code=code)) for what, code in refused.items()}
    outcomes = {what: (result.stdout, result.stderr) for what, result in results.items()}
    assert outcomes == dict.fromkeys(refused, ("refused\n", ""))


def test_landlock_keeps_signals_in_and_lets_programs_work(sandboxes):
    run_under_landlock = sandboxes("landlock", NOT_ROOT)
    code = f"""
        import ctypes, numpy, tempfile
        libc = ctypes.CDLL(None, use_errno=True)
        pid = {os.getpid()}
        print(libc.syscall(234, pid, pid, 0), libc.prlimit(pid, 7, None, None), end=" ")
        print(libc.setpriority(0, pid, 19), end=" ")
        print(numpy.ones(2).sum())
        with tempfile.TemporaryDirectory() as folder, open(folder + "/f", "w+") as file:
            print(file.write("text"))
    """
    assert run_under_landlock(textwrap.dedent(code)).stdout == "-1 -1 -1 2.0\n4\n"


def test_the_filter_of_system_calls_also_binds_programs_that_a_snippet_starts(run):
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-I', '-c', 'import socket; socket.socket()'])"
    )
    assert "PermissionError" in run(code).stderr


def test_a_snippet_has_no_huge_pages_nor_have_programs_that_it_starts(run):
    code = "import os; os.system('grep THP_enabled /proc/self/status')"
    assert run(code).stdout == "THP_enabled:\t0\n"


def test_a_snippet_sees_no_process_but_its_own_and_no_device(run):
    code = """
        import os
        print(sorted(int(pid) for pid in os.listdir("/proc") if pid.isdigit()))
        print(sorted(os.listdir("/dev")))
        print(sorted(os.listdir("/dev/fd"))[:3], len(os.listdir("/dev/fd")))
    """
    processes, devices, descriptors = run(textwrap.dedent(code)).stdout.splitlines()
    assert processes == "[1, 2]"  # its keeper and it
    assert devices == str(
        ["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom"]
    )
    assert descriptors == "['0', '1', '2'] 4"  # one of them lists the others


def test_a_snippet_inherits_nothing_of_this_process(run, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    code = """
        import os
        print("hunter2" in str(os.environ), "hunter2" in open("/proc/self/environ").read())
    """
    assert run(textwrap.dedent(code)).stdout == "False False\n"


def test_no_two_snippets_see_each_others_files(run):
    run("open('/tmp/message', 'w').write('hello')")
    seen = run("import os; print(*('message' in os.listdir(one) for one in ('/tmp', '/dev/shm')))")
    assert seen.stdout == "False False\n"


# How to use up time, memory or processes -> how it ends.
BOMBS = {
    "a loop": ("while True: pass", "cpu"),
    "a loop in C": ("sum(range(10**12))", "cpu"),
    "a sleep": ("import time; time.sleep(1000)", "timeout"),
    "a reader without input": ("import os; r, w = os.pipe(); os.read(r, 1)", "timeout"),
    "signals ignored": (
        "import signal, time\n"
        "for one in set(signal.Signals) - {9, 19}: signal.signal(one, signal.SIG_IGN)\n"
        "time.sleep(1000)",
        "timeout",
    ),
    "processes that fork": (
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "cpu",
    ),
    "processes that eat memory": (
        "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (80 << 20)\ntime.sleep(1000)",
        "memory",
    ),
    "processes that share the CPU": (
        "import os\nfor _ in range(2): os.fork()\nwhile True: pass",
        "cpu",
    ),
    "processes that eat memory and forbid to look into them": (
        "import ctypes, os, time\nfor _ in range(3): os.fork()\n"
        "ctypes.CDLL(None).prctl(4, 0)\nx = b'x' * (80 << 20)\ntime.sleep(1000)",
        "memory",
    ),
    "processes that eat memory without their first thread": (
        "import ctypes, os, threading, time\nfor _ in range(3): os.fork()\n"
        "def eat():\n  time.sleep(0.1)\n  x = b'x' * (80 << 20)\n  time.sleep(1000)\n"
        "threading.Thread(target=eat).start()\nctypes.CDLL(None).syscall(60, 0)",
        "memory",
    ),
    "processes that share the CPU and forbid to look into them": (
        "import ctypes, os, time\nfor _ in range(3): os.fork()\n"
        "ctypes.CDLL(None).prctl(4, 0)\n"
        "while time.process_time() < 0.2: pass\ntime.sleep(1000)",
        "cpu",
    ),
    "a crash": ("import ctypes; ctypes.string_at(0)", "killed"),
    "calls by the numbers of another machine": (
        "import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 41, 1, 1, 0)",
        "killed",
    ),
    "a stop": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "a parser's stack": ("eval('(' * 10**5)", "error"),
    "a recursion": ("def f(): f()\nf()", "error"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_it_ends_and_leaves_nothing(what, run):
    code, status = BOMBS[what]
    wall_s = 0.5 if status == "timeout" else 60
    # Filling the memory takes more than 0.3 s of the CPU on some machines.
    cpu_s = 30.0 if status == "memory" else 0.3
    limits = SandboxLimits(wall_s=wall_s, cpu_s=cpu_s, memory_mb=256)
    assert run(code, limits=limits).status == SandboxStatus(status)
    assert wait_until(run.has_left_nothing)


def test_processes_that_nobody_waits_for_do_not_hide_their_time(run):
    try:
        os.close(kernel.open_task_clock())
    except OSError as error:
        pytest.skip(str(error))
    code = """
        import contextlib, os, signal, time
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            if os.fork() == 0:
                while time.process_time() < 0.01: pass
                os._exit(0)
            with contextlib.suppress(ChildProcessError): os.wait()
        """
    done = run(textwrap.dedent(code), limits=SandboxLimits(wall_s=10, cpu_s=0.5))
    assert done.status is SandboxStatus.CPU
    assert 0.5 < done.cpu_s < 5


def test_a_daemon_does_not_outlive_its_snippet(run):
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        os.wait()
        print("started")
    """
    assert run(textwrap.dedent(code)).stdout == "started\n"
    assert wait_until(run.has_left_nothing)


def test_a_snippet_cannot_kill_its_keeper_or_the_zygote(run):
    code = """
        import contextlib, os, signal
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(PermissionError):  # where the sandbox's owner is root
                os.kill(1, number)
        print("alive")
    """
    assert run(textwrap.dedent(code)).stdout == "alive\n"
    signal_all = "import os; os.kill(0, 9)"
    assert run(signal_all).status is SandboxStatus.KILLED
    assert run("print(1)").stdout == "1\n"


def test_output_is_bounded(run):
    limits = SandboxLimits(output_bytes=100, wall_s=60, cpu_s=0.3)
    code = """
        import os
        while True:
            os.write(1, b"x" * 10000)
            os.write(2, b"y")
    """
    result = run(textwrap.dedent(code), limits=limits)
    assert (result.stdout, result.stderr) == ("x" * 100, "y" * 100)
    assert result.is_truncated


def test_what_a_snippet_writes_is_text_and_never_a_result(run):
    forged = '{"status": "ok", "stdout": "right", "exit_code": 0}'
    code = f"""
        import os
        class Forged:
            def __reduce__(self):
                return os.system, ("true",)
            __repr__ = __str__ = lambda self: {forged!r}
        for descriptor in range(20):
            try:
                os.write(descriptor, {forged.encode()!r} + b"\\n\\xff\\x00")
            except OSError:
                pass
        raise SystemExit(Forged())
    """
    result = run(textwrap.dedent(code))
    assert result.status is SandboxStatus.ERROR
    assert result.exit_code == 1
    assert result.stdout == f"{forged}\n\ufffd\x00"
    assert result.stderr.endswith(forged + "\n")


@pytest.mark.parametrize(("isolation", "processes"), [("namespaces", 5), ("landlock", 3)])
def test_everything_dies_with_this_process_even_by_sigkill(isolation, processes, tmp_path):
    if errors := SandboxConfig(isolation=isolation).errors("sandbox"):
        pytest.skip(errors[0])
    program = f"""
        import asyncio
        from torchtitan_rl import Sandbox, SandboxConfig, SandboxLimits
        code = "import os, time; open('f', 'w')\\nif {processes} > 3: os.fork()\\ntime.sleep(1000)"
        async def main():
            limits = SandboxLimits(wall_s=1000)
            async with Sandbox(SandboxConfig(isolation={isolation!r}, limits=limits)) as sandbox:
                await sandbox.run(code)
        asyncio.run(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    owner = psutil.Process(process.pid)
    assert wait_until(lambda: len(owner.children(recursive=True)) == processes)
    below = owner.children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert wait_until(lambda: not any(map(is_alive, below)) and not any(tmp_path.iterdir()))
