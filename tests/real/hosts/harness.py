"""Several "hosts" on one machine, for tests: network namespaces with real addresses.

Each host has its own addresses, process numbers, host name and ``/dev/shm``: what works between
hosts works without shared memory and without signals. A host that is cut off keeps running, its
network link is down. Where namespaces are not allowed, hosts are loopback addresses, and a host is
cut off by stopping its processes.

::

    with make_hosts(2) as (a, b):
        worker = b.start(["torchtitan-rl", "worker", "--address", f"tcp://{b.address}:26600"])
        b.cut()
        b.restore()
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import psutil

from tests.real.runs import ROOT

_START_S = 10.0
_END_S = 10.0
_TAG = "TORCHTITAN_RL_TEST_HOST"
_SHM_BYTES = 2 << 30
_numbers = itertools.count(os.getpid() % 200)  # of networks: two test runs at once do not collide

_BOOT = """
mount -t tmpfs -o size=$2 tmpfs /dev/shm && hostname "$1" && ip link set lo up && echo up
exec sleep infinity
"""


class Host(Protocol):
    """One host. Everything that was started in it ends with it."""

    name: str
    address: str

    def start(
        self,
        words: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> HostProcess:
        """Run a command; ``log`` gets what it prints."""
        ...

    def processes(self) -> list[psutil.Process]:
        """All that run in it, whoever their parents are."""
        ...

    def cut(self) -> None:
        """Cut it off from the others: nothing arrives or leaves, and nobody is told."""
        ...

    def restore(self) -> None:
        """Undo `cut`."""
        ...


class HostProcess:
    """A command in a host."""

    def __init__(self, launcher: subprocess.Popen[bytes], host: Host, log: Path | None) -> None:
        self.launcher = launcher
        self.host = host
        self.log = log

    @property
    def is_running(self) -> bool:
        return self.launcher.poll() is None

    def wait(self, timeout_s: float) -> int:
        """Its exit code, -n where signal n ended it."""
        return self.launcher.wait(timeout_s)

    def signal(self, number: int) -> None:
        """Send a signal to the command itself, not to the launcher that waits for it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.launcher.pid)
            children = launcher.children() if launcher.name() == "nsenter" else []
            (children or [launcher])[0].send_signal(number)

    def text(self) -> str:
        """What it has printed so far."""
        return "" if self.log is None else self.log.read_text(errors="replace")


class NamespaceHost:
    """A host of its own as far as the kernel can make one."""

    def __init__(self, name: str, address: str, bridge: str, link: str) -> None:
        self.name, self.address, self._link = name, address, link
        unshare = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork"]
        self._boot = subprocess.Popen(
            [*unshare, "--kill-child", "--mount-proc", "sh", "-c", _BOOT, "host", name,
             str(_SHM_BYTES)],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._boot.stdout is not None
        assert self._boot.stdout.readline() == b"up\n", f"host {name} did not start"
        self._init = psutil.Process(self._boot.pid).children()[0]
        self._namespace = _namespace_of(self._init.pid)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns",
            str(self._init.pid))  # fmt: skip
        _ip("link", "set", link, "master", bridge, "up")
        inside = ["nsenter", "-t", str(self._init.pid), "-n", "ip"]
        subprocess.run([*inside, "addr", "add", f"{address}/24", "dev", "eth0"], check=True)
        subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)

    def start(
        self,
        words: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> HostProcess:
        enter = ["nsenter", "-t", str(self._init.pid), "-n", "-m", "-u", "-i", "-p"]
        # nsenter takes the working directory of its target without --wdns.
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *words]
        return HostProcess(_popen([*enter, *inside], log, environment), self, log)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_inside = _namespace_of(process.pid) == self._namespace
                if is_inside and process.pid != self._init.pid:
                    found.append(process)
        return [process for process in found if not _is_zombie(process)]

    def cut(self) -> None:
        _ip("link", "set", self._link, "down")

    def restore(self) -> None:
        _ip("link", "set", self._link, "up")

    def close(self) -> None:
        """The kernel ends every process of a namespace whose first process has ended."""
        self._boot.kill()
        self._boot.wait(_END_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._init.kill()
            self._init.wait(_END_S)  # its end of the link takes ours with it


class LoopbackHost:
    """An address of this machine, and the processes that were started with its tag."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._tag = str(uuid.uuid4())

    def start(
        self,
        words: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> HostProcess:
        return HostProcess(_popen(words, log, {**environment, _TAG: self._tag}), self, log)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_TAG) == self._tag and not _is_zombie(process):
                    found.append(process)
        return found

    def cut(self) -> None:
        self._signal(signal.SIGSTOP)

    def restore(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        deadline_s = time.monotonic() + _END_S
        while self.processes() and time.monotonic() < deadline_s:
            self._signal(signal.SIGKILL)
            time.sleep(0.1)

    def _signal(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)


@contextmanager
def make_hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """``count`` hosts that reach each other; gone, with all their processes, when it is left."""
    with ExitStack() as stack:
        if not namespaces_are_allowed():
            loopback = [LoopbackHost(f"host{n}", f"127.0.0.{n + 2}") for n in range(count)]
            for one in loopback:
                stack.callback(one.close)
            yield tuple(loopback)
            return
        network = next(_numbers) % 200
        bridge = f"trl{os.getpid() % 100000}b{network}"[:15]
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        hosts = []
        for n in range(count):
            link = f"trl{os.getpid() % 100000}n{network}v{n}"[:15]
            host = NamespaceHost(f"host{n}", f"10.231.{network}.{n + 1}", bridge, link)
            stack.callback(host.close)
            hosts.append(host)
        yield tuple(hosts)


def namespaces_are_allowed() -> bool:
    """Whether this process may make hosts of their own."""
    words = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"]
    return (
        os.geteuid() == 0
        and subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode == 0
        and _may_make_links()
    )


def python(*words: str) -> list[str]:
    """A command that runs this interpreter."""
    return [sys.executable, *words]


def _may_make_links() -> bool:
    link = f"trl{os.getpid() % 100000}try"
    words = ["ip", "link", "add", link, "type", "bridge"]
    if subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode != 0:
        return False
    _ip("link", "del", link)
    return True


def _popen(
    words: Sequence[str], log: Path | None, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with (log or Path(os.devnull)).open("ab") as output:
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _namespace_of(pid: int) -> int:
    """The pid namespace, which nsenter's children are in, but not nsenter."""
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
