"""What snippets must not do to their user, in each isolation, whatever a call of theirs returns.

Each attack is followed by a look at all that it may have harmed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fast.sandbox.conftest import NOT_ROOT, SECRET, USERS, Run, wait_until
from torchtitan_rl.sandbox.sandbox import SandboxConfig, SandboxLimits, SandboxStatus

KINDS = ("namespaces", "landlock", "limits")
CLOSED = ("namespaces", "landlock")  # the others leave the user's files and processes open
# `attempt` goes on whatever becomes of its lines; `call` is a system call, by its name or, where
# that is new, its number, which is the same on all machines.
ATTEMPT = """
import ctypes, fcntl, mmap, os, resource, signal, socket, stat, time
libc = ctypes.CDLL(None, use_errno=True)
seccomp = ctypes.CDLL("libseccomp.so.2")
SHOWN, HIDDEN, OWNER, KEEPER = {shown!r}, {hidden!r}, {owner}, os.getppid()
keep = []
def attempt_quietly(act):
    try:
        return act()
    except OSError:
        return False
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes, libc.mremap.argtypes = [ctypes.c_ssize_t] * 6, [ctypes.c_ssize_t] * 4
libc.mprotect.argtypes = [ctypes.c_ssize_t] * 3
def hold(size, flags, fd):
    start = libc.mmap(0, size, 3, flags, fd, 0)
    if start is None or start == 2**64 - 1:
        raise MemoryError("mmap")
    ctypes.memset(start, 1, size)
    libc.mremap(start, size, 4096, 0)
def call(name, *args):
    number = seccomp.seccomp_syscall_resolve_name(name.encode()) if isinstance(name, str) else name
    done = libc.syscall(number, *args)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
def attempt(lines):
    for line in filter(None, map(str.strip, lines.splitlines())):
        try:
            exec(line, globals())
        except (OSError, MemoryError, ValueError, AssertionError) as error:
            print(line, error)
        else:
            print(line, "done")
"""
HARMFUL = {
    "rights of files": """
        fd, at = os.open(FILE, os.O_RDONLY), FILE.encode()
        os.chmod(FILE, 0o666)
        os.chmod(os.path.dirname(FILE), 0o777)
        os.chmod(os.open(FILE, os.O_RDONLY), 0o666)
        os.chmod(os.path.basename(FILE), 0o666, dir_fd=os.open(os.path.dirname(FILE), os.O_PATH))
        call(452, -100, FILE.encode(), 0o666, 0)
        call(452, os.open(FILE, os.O_PATH), b"", 0o666, 0x1000)
    """,
    "owners of files": """
        os.chown(FILE, os.getuid(), 7777)
        os.lchown(FILE, 7777, -1)
        os.fchown(os.open(FILE, os.O_RDONLY), -1, 7777)
    """,
    "times of files": """
        os.utime(FILE, (1, 1))
        os.utime(os.open(FILE, os.O_RDONLY), (1, 1))
        call("utimensat", os.open(FILE, os.O_RDONLY), None, None, 0)
    """,
    "sizes of files": """
        os.truncate(FILE, 0)
        os.open(FILE, os.O_RDONLY | os.O_TRUNC)
        call("openat", -100, FILE.encode(), os.O_TRUNC)
        call("openat2", -100, FILE.encode(), (ctypes.c_uint64 * 3)(os.O_TRUNC), 24)
    """,
    "attributes of files": """
        os.setxattr(FILE, "user.name", b"x")
        os.setxattr(os.open(FILE, os.O_RDONLY), "user.name", b"x")
        call(463, -100, FILE.encode(), 0, b"user.n", (ctypes.c_uint64 * 2)(FILE_SIZE), 16)
        call(469, -100, FILE.encode(), (ctypes.c_uint64 * 3)(0x40), 24, 0)
        fcntl.ioctl(os.open(FILE, os.O_RDONLY), 0x40086602, b"\\x40" + bytes(7))
        fcntl.ioctl(os.open(FILE, os.O_RDONLY), 0x401C5820, b"\\x40" + bytes(27))
    """,
    "locks and leases of files": """
        fcntl.fcntl(os.open(FILE, os.O_RDONLY), 1024, 0)
    """,
}
# The limits that leave the user's files open are not about these.
HARMFUL_TO_CONTENTS = {
    "contents of files": """
        open(FILE, "w").write("x")
        open(FILE, "a").write("x")
        os.remove(FILE)
        os.rename(FILE, "mine")
        os.link(FILE, "mine")
        open(os.path.dirname(FILE) + "/new", "w")
        os.mkdir(os.path.dirname(FILE) + "/new")
        os.symlink("/", os.path.dirname(FILE) + "/new")
        os.rename(os.path.dirname(FILE), "mine")
    """,
    "files by their handles": """
        handle = (ctypes.c_uint * 34)(128)
        mount = ctypes.byref(ctypes.c_int())
        call("name_to_handle_at", -100, FILE.encode(), handle, mount, 0)
        call("open_by_handle_at", os.open("/usr", os.O_RDONLY), handle, os.O_WRONLY | os.O_TRUNC)
    """,
}
# What takes more and more memory or room on the disk, most of it in no process's account.
HOARDS = {
    "sockets": """
        for _ in range(5): os.fork()
        while True:
            for end in (pair := socket.socketpair()):
                keep.append(end)
                end.setblocking(False)
                attempt_quietly(lambda: end.setsockopt(1, socket.SO_SNDBUF, 1 << 30))
                while attempt_quietly(lambda: end.send(bytes(1 << 16))): pass
    """,
    "pipes": """
        for _ in range(5): os.fork()
        while True:
            read, write = os.pipe()
            os.set_blocking(write, False)
            attempt_quietly(lambda: fcntl.fcntl(write, 1031, 1 << 20))
            while attempt_quietly(lambda: os.write(write, bytes(1 << 16))): pass
    """,
    "shared memory of which little is mapped": """
        while True: hold(8 << 20, 0x21, -1)
    """,
    "a device of shared memory": """
        fd = os.open("/dev/zero", os.O_RDWR)
        while True: hold(8 << 20, 1, fd)
    """,
    "reserved huge pages": """
        mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
        while True: time.sleep(1)
    """,
    "mappings": """
        start = libc.mmap(0, 48 << 20, 0, 0x4022, -1, 0)
        for page in range(0, 12288, 2):
            libc.mprotect(start + page * 4096, 4096, 1)
        for _ in range(5): os.fork()
        while True: time.sleep(1)
    """,
    "locks of files": """
        for _ in range(5): os.fork()
        for name in range(5):
            file = os.open(f"{os.getpid()}.{name}", os.O_RDWR | os.O_CREAT)
            for start in range(6000, 0, -2):
                fcntl.lockf(file, fcntl.LOCK_EX, 1, start)
        while True: time.sleep(1)
    """,
    "files": """
        for name in range(1000):
            with open(str(name), "wb") as file: file.write(bytes(8 << 20))
        while True: time.sleep(1)
    """,
    "files in a folder that is closed to its owner": """
        os.mkdir("closed", 0o300)
        for name in range(1000):
            with open(f"closed/{name}", "wb") as file: file.write(bytes(8 << 20))
        while True: time.sleep(1)
    """,
    "removed files": """
        for name in range(50):
            keep.append(file := open(str(name), "wb"))
            os.remove(file.name)
            file.write(bytes(8 << 20))
        while True: time.sleep(1)
    """,
    "removed files of which little is mapped": """
        for name in range(50):
            with open(str(name), "w+b") as file:
                os.remove(file.name)
                file.truncate(8 << 20)
                hold(8 << 20, 1, file.fileno())
        while True: time.sleep(1)
    """,
    "threads": """
        import threading, _thread
        threading.stack_size(32768)
        for _ in range(1000): _thread.start_new_thread(time.sleep, (1000,))
        while True: time.sleep(1)
    """,
}


@pytest.fixture
def attack(sandboxes: Callable[[str, str], Run]) -> Iterator[Callable[..., Any]]:
    """Run a snippet in a sandbox, and look at what it may have harmed."""

    def run_it(isolation: str, user: str, code: str, **options: Any) -> Any:
        run = sandboxes(isolation, user)
        before = state(run)
        text = ATTEMPT.format(shown=str(run.shown), hidden=str(run.hidden), owner=run.owner.pid)
        result = run(text + textwrap.dedent(code), **options)
        assert state(run) == before
        assert wait_until(run.has_left_nothing)
        assert run("print(1)").stdout == "1\n"
        return result

    return run_it


def state(run: Run) -> list[Any]:
    """Of what belongs to the sandbox's owner."""
    found: list[Any] = []
    for file in (run.shown, run.hidden):
        for path in (file, file.parent):
            status = path.stat()
            found.append((status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns))
            found.append(os.listxattr(path))
        found.append((file.read_text(), os.listdir(file.parent)))
    found += [run.owner.nice(), run.owner.cpu_affinity(), run.owner.ionice()]
    found += [Path(f"/proc/{run.owner.pid}/limits").read_text()]
    return found


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("isolation", KINDS)
def test_no_file_of_the_user_changes(isolation, user, attack):
    harmful = HARMFUL | (HARMFUL_TO_CONTENTS if isolation in CLOSED else {})
    code = "\n".join(
        f"FILE, FILE_SIZE = {name}, 4\nattempt({lines!r})"
        for name in ("SHOWN", "HIDDEN")
        for lines in harmful.values()
    )
    result = attack(isolation, user, code)
    assert (result.status, result.stderr) == (SandboxStatus.OK, "")


# What a snippet does to processes of its user, and to its keeper first of all.
PROCESSES = """
    resource.prlimit(PID, resource.RLIMIT_NOFILE, (0, 0))
    resource.prlimit(PID, resource.RLIMIT_AS, (0, 0))
    resource.prlimit(PID, resource.RLIMIT_CPU, (0, 0))
    os.setpriority(os.PRIO_PROCESS, PID, 19)
    os.setpriority(os.PRIO_PGRP, os.getpgid(PID), 19)
    os.setpriority(os.PRIO_USER, os.getuid(), 19)
    os.setpriority(os.PRIO_USER, 0, 19)
    os.sched_setaffinity(PID, {0})
    os.sched_setscheduler(PID, 5, os.sched_param(0))
    call("sched_setattr", PID, (ctypes.c_uint * 12)(48, 5), 0)
    call("ioprio_set", 1, PID, 3 << 13)
    call("ioprio_set", 3, os.getuid(), 3 << 13)
    call("migrate_pages", PID, 8, None, None)
    call("move_pages", PID, 0, None, None, None, 0)
    call("ptrace", 0x4206, PID, 0, 0)
    call("process_vm_writev", PID, None, 0, None, 0, 0)
    call("pidfd_getfd", call("pidfd_open", PID, 0), 0, 0)
    call("process_madvise", call("pidfd_open", PID, 0), None, 0, 21, 0)
    call("process_mrelease", call("pidfd_open", PID, 0), 0)
    call("kcmp", os.getpid(), PID, 0, 0, 0)
    fcntl.fcntl(1, 8, PID)
"""
THROUGH_PROC = """
    open(f"/proc/{PID}/mem", "r+b")
    os.write(os.open(f"/proc/{PID}/oom_score_adj", os.O_WRONLY), b"1000")
    os.write(os.open(f"/proc/{PID}/clear_refs", os.O_WRONLY), b"1")
    os.write(os.open(f"/proc/{PID}/timerslack_ns", os.O_WRONLY), b"1000000000")
"""
# The keeper of a namespace gets them, and is not killed by any.
SIGNALS = """
    for number in signal.valid_signals(): os.kill(PID, number)
    for number in signal.valid_signals(): call("tgkill", PID, PID, number)
    for number in signal.valid_signals(): call("rt_sigqueueinfo", PID, number, bytes(128))
    for one in signal.valid_signals(): signal.pidfd_send_signal(os.pidfd_open(PID), one)
"""


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("isolation", KINDS)
def test_no_process_of_the_user_is_reached_and_the_keeper_survives(isolation, user, attack):
    refused = PROCESSES + (THROUGH_PROC if isolation in CLOSED else "")
    code = f"""
        for PID in (KEEPER, OWNER):
            attempt({refused!r})
            if PID == OWNER or {isolation != "namespaces"}:
                attempt({SIGNALS!r})
        PID = KEEPER
        print("keeper")
        attempt({SIGNALS!r})
    """
    result = attack(isolation, user, code)
    assert (result.status, result.stderr) == (SandboxStatus.OK, "")
    before_signals = result.stdout.split("keeper")[0].splitlines()
    assert [line for line in before_signals if line.endswith(" done")] == []


@pytest.mark.parametrize("isolation", KINDS)
@pytest.mark.parametrize("what", HOARDS)
def test_a_snippet_that_takes_more_and_more_is_stopped_or_refused(what, isolation, attack):
    if what == "a device of shared memory" and isolation not in CLOSED:
        pytest.skip("not promised")
    limits = SandboxLimits(wall_s=60, cpu_s=600, memory_mb=64, file_mb=32)
    stopped = (SandboxStatus.MEMORY, SandboxStatus.LIMIT)
    refused = (SandboxStatus.ERROR, SandboxStatus.KILLED)  # by a SIGBUS where a file has no room
    assert attack(isolation, NOT_ROOT, HOARDS[what], limits=limits).status in (*stopped, *refused)


def test_landlock_of_linux_before_6_2_does_not_let_files_be_emptied(tmp_path):
    """It asks for no right to truncate, so that the filter of system calls has to."""
    if errors := SandboxConfig(isolation="landlock").errors("sandbox"):
        pytest.skip(errors[0])
    (file := tmp_path / "file").write_text("text")
    code = f"""
        import os
        from torchtitan_rl.sandbox import kernel, namespaces
        from torchtitan_rl.sandbox.namespaces import SyscallFilter
        kernel.landlock_version = lambda: 1
        os.mkdir("own")
        os.chdir("own")
        namespaces.close_files([{str(tmp_path)!r}])
        SyscallFilter(own_machine=False).load()
        for empty in (
            lambda: os.truncate({str(file)!r}, 0),
            lambda: os.open({str(file)!r}, os.O_TRUNC),
            lambda: open({str(file)!r}, "w"),
        ):
            try:
                empty()
            except OSError:
                print("refused")
        open("own", "w").write("x")
        print(open("own", "r+").truncate(0))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "refused\nrefused\nrefused\n0\n"
    assert file.read_text() == "text"


# What a snippet reaches of its user, who is not root here, and with which isolation.
OPEN = {
    "os.stat(HIDDEN)": ("landlock", "limits"),
    "os.listxattr(HIDDEN)": ("landlock", "limits"),
    "os.stat(f'/proc/{OWNER}')": ("landlock", "limits"),
    "os.listdir(os.path.dirname(HIDDEN))": ("limits",),
    "open(HIDDEN, 'r+')": ("limits",),
    f"assert {SECRET!r} in open(f'/proc/{{OWNER}}/environ').read()": ("limits",),
    "open(f'/proc/{OWNER}/maps').read()": ("limits",),  # as is mem, unless Yama forbids it
    "open(f'/proc/{OWNER}/oom_score_adj', 'w')": ("limits",),
    "os.listdir(f'/proc/{OWNER}/fd')": ("limits",),
    "os.remove(open(f'/dev/shm/{OWNER}', 'w').name)": ("namespaces", "limits"),  # its own there
    "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096)": ("limits",),
}


@pytest.mark.parametrize("isolation", KINDS)
def test_what_an_isolation_leaves_open_is_what_the_docs_say(isolation, attack):
    result = attack(isolation, NOT_ROOT, f"attempt({chr(10).join(OPEN)!r})")
    is_open = dict(line.rsplit(" done", 1) for line in result.stdout.splitlines() if "done" in line)
    assert is_open.keys() == {line for line, kinds in OPEN.items() if isolation in kinds}


LITTER = {
    "closed folders": """
        os.umask(0)
        for mode in (0o000, 0o300, 0o500):
            os.makedirs(f"{mode}/inner")
            os.mkdir(f"{mode}/inner/closed", mode)
            if mode == 0o300:
                open("192/inner/closed/file", "w").write("x")
            for path in (f"{mode}/inner", f"{mode}"):
                os.chmod(path, mode)
        os.close(os.open("unreadable", os.O_CREAT | os.O_WRONLY, 0))
    """,
    "a deep tree": """
        for _ in range(3000):
            os.mkdir("folder")
            os.chdir("folder")
        open("file", "w").write("x")
    """,
    "odd names": """
        for name in (b"-rf", b"\\n", b"\\xff" * 255, b" ", "\\N{SNOWMAN}".encode()):
            os.mkdir(name)
            open(os.path.join(name, name), "w").write("x")
        os.symlink(os.path.dirname(SHOWN), "link")
        os.symlink(os.path.dirname(HIDDEN), "-rf/link")
        os.symlink("/", "root")
    """,
}


@pytest.mark.parametrize("isolation", KINDS)
@pytest.mark.parametrize("what", LITTER)
def test_nothing_that_a_snippet_wrote_stays_on_the_disk(what, isolation, attack):
    limits = SandboxLimits(files=10**5, wall_s=60, cpu_s=60)
    result = attack(isolation, NOT_ROOT, LITTER[what], limits=limits)
    assert result.stderr == ""
    assert result.status.value in ("ok", "limit")  # what cannot be counted
