"""Linux system calls that Python does not offer: namespaces, mounts, capabilities, Landlock,
performance counters. Each function raises an OSError that names the failed call."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Iterable

CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 1, 4, 38, 41

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}  # numbers of system calls
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_MOUNT_SETATTR = 442
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2
_SOFTWARE, _TASK_CLOCK = 1, 1
# Unprivileged users must set _EXCLUDE_KERNEL; clocks ignore it.
_INHERIT, _EXCLUDE_KERNEL = 1 << 1, 1 << 5
_CLOSE_ON_EXEC = 8
_CAPABILITY_VERSION = 0x20080522
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULESET_VERSION, _PATH_BENEATH = 1, 1
_ACCESS_READ = 0b1101  # execute and read files, list folders
_ACCESS_FILE = 0xC007  # the rights that a rule for a file, not a folder, may allow
_ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights by version; later versions: 16
_SCOPES = 3  # no signals to other processes, no abstract sockets of other processes
_SCOPES_SINCE = 6
_SET_SECCOMP, _SECCOMP_FILTER = 22, 2
_INSTRUCTION_BYTES = 8  # size of an instruction of a seccomp filter
_COLLAPSE = 25
_HUGE_PAGE_BYTES = 1 << 21

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    _check(_libc.setns(descriptor, kind), "setns")


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def mount(source: str, target: str, kind: str = "", *, flags: int = 0, options: str = "") -> None:
    texts = [os.fsencode(text) or None for text in (source, target, kind, options)]
    given = (texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(_libc.mount(*given), f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, old_root: str) -> None:
    number = _PIVOT_ROOT.get(os.uname().machine, -1)
    _check(_libc.syscall(number, os.fsencode(new_root), os.fsencode(old_root)), "pivot_root")


def make_read_only(target: str, *, recursive: bool = True, devices: bool = False) -> None:
    """Make a mount, and the mounts below it, read-only and ``nosuid`` (needs Linux 5.12)."""
    attributes = _ATTR_RDONLY | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV)
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    done = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, wanted, ctypes.c_size_t(32)
    )
    _check(done, f"mount_setattr {target}")


def drop_capabilities() -> None:
    """Drop all capabilities irrevocably: executing a program or changing the user id cannot regain
    them."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, none), "capset")


def open_task_clock() -> int:
    """Open a counter of CPU time; reading returns 8 bytes, in nanoseconds. It counts the time of
    this thread and of all that it starts from now on, even after they have ended."""
    attributes = bytearray(128)
    struct.pack_into("=IIQ", attributes, 0, _SOFTWARE, len(attributes), _TASK_CLOCK)
    struct.pack_into("=Q", attributes, 40, _INHERIT | _EXCLUDE_KERNEL)
    number = _PERF_EVENT_OPEN.get(os.uname().machine, -1)
    counter: int = _libc.syscall(number, bytes(attributes), 0, -1, -1, _CLOSE_ON_EXEC)
    _check(counter, "perf_event_open")
    return counter


def filter_system_calls(program: bytes) -> None:
    """Apply a seccomp filter to this thread, which must have dropped its capabilities, and to all
    processes that it starts, irrevocably."""
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("@HP", len(program) // _INSTRUCTION_BYTES, ctypes.addressof(code))
    _check(_libc.prctl(_SET_SECCOMP, _SECCOMP_FILTER, filter_, 0, 0), "seccomp")


def join_pages() -> None:
    """Join this process's memory into huge pages, so that forking copies fewer page-table entries.
    No effect before Linux 6.1."""
    with open("/proc/self/maps") as lines:
        mappings = [line.split() for line in lines]
    for addresses, rights, _, _, inode, *name in mappings:
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            start = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
            size = (end - start) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
            if size > 0:
                _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _COLLAPSE)


def landlock_version() -> int:
    version: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _RULESET_VERSION)
    _check(version, "landlock")
    return version


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow this process, and all that it starts, to access only these files and folders (Landlock,
    Linux 5.13); newer Linux also forbids them to send signals to other processes."""
    version = landlock_version()
    everything = (1 << _ACCESS_BITS.get(version, 16)) - 1
    handled = (ctypes.c_uint64 * 3)(everything, 0, _SCOPES if version >= _SCOPES_SINCE else 0)
    size = ctypes.c_size_t(24 if version >= _SCOPES_SINCE else 8)
    rules = _libc.syscall(_CREATE_RULESET, handled, size, 0)
    _check(rules, "landlock_create_ruleset")
    allowed = [(path, _ACCESS_READ) for path in readable]
    allowed += [(path, everything) for path in writable]
    for path, access in allowed:
        descriptor = os.open(path, os.O_PATH)
        rule = struct.pack(
            "=Qi", access if os.path.isdir(path) else access & _ACCESS_FILE, descriptor
        )
        _check(_libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0), f"landlock rule {path}")
        os.close(descriptor)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _check(_libc.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)


class CpuClock:
    """Counts the CPU time of this process's descendants from now on, even if no process waits for
    them: they inherit the kernel's counter. If counters are not allowed
    (``kernel.perf_event_paranoid`` is 3, or a container refuses `perf_event_open`), the time is
    always 0."""

    def __init__(self) -> None:
        self._started_s = time.process_time()
        try:
            self._counter: int | None = open_task_clock()
        except OSError:
            self._counter = None

    def read_s(self) -> float:
        if self._counter is None:
            return 0.0
        (nanoseconds,) = struct.unpack("Q", os.read(self._counter, 8))
        return float(nanoseconds) / 1e9 - (time.process_time() - self._started_s)
