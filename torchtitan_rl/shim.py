"""A process between a caller and its command, which kills everything the command started.

Run as a script (``python -I -S shim.py LINK PROGRAM ARG...``); it imports little, so that it starts
in milliseconds. The shim kills everything

- when the command has ended and has left processes;
- when the calling process has died;
- on SIGTERM, SIGINT or SIGHUP.

LINK is the number of a file descriptor, one end of a socket pair with the caller (`run_command`),
or ``parent=PID`` with the caller's pid. When the caller's end is closed, the shim kills everything.
The shim writes a report to the socket: the first line is ``pid PID``, the last line ``exit CODE``,
``signal NUMBER`` or ``error MESSAGE``. The last line is missing if the caller closed its end first.

As a child subreaper, the shim inherits every orphan among its descendants, including daemons that
forked twice and started their own sessions. So its descendants are exactly the processes to kill
(Linux; elsewhere only the command's own process group is killed). If a program kills the shim, the
program's daemons survive: the shim cleans up, and is not a sandbox.
"""

import ctypes
import os
import select
import signal
import sys
import time

NO_LINK = -1
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.5  # between two checks that the parent is still the same process
KILL_S = 10.0  # a process still alive after this is stuck in the kernel
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    parent, link = os.getppid(), NO_LINK
    if sys.argv[1].startswith("parent="):
        parent = int(sys.argv[1].removeprefix("parent="))  # it may be dead already
    else:
        link = int(sys.argv[1])
        os.set_inheritable(link, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (*STOPPING, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # each only wakes the select below
    command, outcome = start(sys.argv[2:], link)
    if command:
        os.close(0)  # only the command holds its input and output
        os.close(1)
        outcome = watch(command, link, wake, parent)
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        stuck = kill_everything_below(command)
        if stuck:
            outcome = f"error cannot kill processes {stuck}"
    tell(link, outcome)


def tell(link: int, line: str) -> None:
    if link == NO_LINK:
        if line.startswith("error"):
            print(line, file=sys.stderr, flush=True)
        return
    try:
        os.write(link, line.encode(errors="replace"))
    except OSError:  # the other end is closed, which `watch` sees too
        return


def start(argv: list[str], link: int) -> tuple[int, str]:
    """Fork and exec. Returns the command's pid and "", or 0 and the reason for a failed start."""
    failure, report = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            tell(link, f"pid {os.getpid()}\n")  # before the program can kill this process
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(number, signal.SIG_DFL)
            os.execvp(argv[0], argv)
        except BaseException as error:
            os.write(report, f"error {error}".encode(errors="replace"))
        finally:
            os._exit(127)
    os.close(report)
    problem = os.read(failure, 4096).decode(errors="replace")
    return (0, problem) if problem else (pid, "")


def watch(command: int, link: int, wake: int, parent: int) -> str:
    """Wait, and return how the command ended; "" if the caller is gone or a signal arrived
    first."""
    watched = [wake] if link == NO_LINK else [link, wake]
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans are reaped, too
            if ended[0] == command:
                code = os.waitstatus_to_exitcode(ended[1])
                return f"signal {-code}" if code < 0 else f"exit {code}"
        readable, _, _ = select.select(watched, [], [], POLL_S)
        woken_by = os.read(wake, 512) if wake in readable else b""
        if link in readable or set(STOPPING) & set(woken_by) or os.getppid() != parent:
            return ""


def kill_everything_below(command: int) -> list[int]:
    """Kill and reap until no child is left. Returns the pids that did not die within ``KILL_S``.

    The children of a killed process become children of this one, so none is missed.
    """
    deadline = time.monotonic() + KILL_S
    while True:
        below = descendants(os.getpid())
        for pid in below or [-command]:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # gone already
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        if time.monotonic() > deadline:
            return below
        time.sleep(0.002)


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
        except OSError:  # gone already
            continue
        children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
