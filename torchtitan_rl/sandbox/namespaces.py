"""Limits what a snippet sees of the machine, and which system calls it may make.

`enter` and `make_root` are called once, by the processes from which all snippets are forked;
`enter_private` and `become_nobody` are called for each snippet. The root file system has the
system's libraries, Python and its packages, all read-only; there is no network device. For a
snippet without namespaces, `close_files` forbids access to all other files.

A seccomp filter, made by libseccomp, checks all system calls. Calls that are not in the list fail
as if the kernel did not have them: calls for namespaces, mounts, tracing, keys, shared memory
without a file and io_uring, and every newer call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchtitan_rl.sandbox import kernel

USER_ID = 1000  # the user id that snippets see
_NOBODY = 65534  # the user id under which snippets run if root started the sandbox
_UNDER_TMP = "/shown"  # where the readable files of the original /tmp are for snippets
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives")
_DEVICES = ("null", "full", "random", "urandom")  # no "zero": mapping it makes shared memory
_NAMES = {
    "etc/passwd": f"user:x:{USER_ID}:{USER_ID}::/tmp:/bin/sh\n",
    "etc/group": f"user:x:{USER_ID}:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}
_LINKS = {
    "dev/shm": "/tmp",
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
}


def enter() -> None:
    """Move this process into new namespaces, in which alone its rights apply; into that of
    process ids, the next process that it forks. If root started the sandbox, snippets run as
    another user."""
    can_be_nobody = os.geteuid() == 0 and all(map(_maps_nobody, ("uid_map", "gid_map")))
    if can_be_nobody:
        os.setgroups([])
    writer, unshared = _start_id_writer(can_be_nobody)
    kernel.unshare(
        kernel.CLONE_NEWUSER
        | kernel.CLONE_NEWPID
        | kernel.CLONE_NEWNS
        | kernel.CLONE_NEWNET
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
        | kernel.CLONE_NEWCGROUP
    )
    os.close(unshared)
    _, status = os.waitpid(writer, 0)
    if status:
        raise OSError(status, "its user ids cannot be mapped")


def close_files(readable: Iterable[str]) -> None:
    """Forbid this process, without namespaces, all files except its own folder and those that
    `make_root` would have shown."""
    system = filter(os.path.exists, (*_SYSTEM, "/etc/ld.so.cache"))
    devices = [f"/dev/{name}" for name in _DEVICES]
    shown = {*system, sys.base_prefix, sys.prefix, *readable}
    kernel.restrict_files(shown, (*devices, os.getcwd()))


def make_root(readable: Iterable[str]) -> list[str]:
    """Make a file system in memory the root, with parts of the old root mounted into it. Returns
    the mounted paths below ``/tmp``, for `enter_private`. Raises OSError: a path of ``readable``
    does not exist, or is ``/`` or ``/tmp`` itself."""
    optional = [path for path in _SYSTEM if os.path.exists(path)]
    places = {os.path.abspath(path) for path in (sys.base_prefix, sys.prefix, *readable)}
    shown = {path: os.path.realpath(path, strict=True) for path in (*optional, *places)}
    links = {path: os.readlink(path) for path in optional if os.path.islink(path)}
    if {"/", "/tmp"} & shown.keys():
        raise OSError("/tmp cannot be shown: snippets have a /tmp of their own")
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", options="mode=0755")
    os.mkdir("/tmp/old")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    _make_small_files()
    for path, target in links.items():
        os.symlink(target, path)
    temporary = []
    for path in sorted(shown, key=len):  # parents first: their contents are mounted with them
        for place in (shown[path], path):
            if not os.path.lexists(place):
                _bind(shown[path], place)
                if Path(place).is_relative_to("/tmp"):
                    temporary.append(place)
    os.mkdir(_UNDER_TMP)
    kernel.mount("proc", "/proc", "proc")  # without this, `enter_private` could not mount its own
    kernel.unmount("/old")
    os.rmdir("/old")
    kernel.make_read_only("/", recursive=False)
    return temporary


def enter_private(file_bytes: int, files: int, temporary: Sequence[str]) -> None:
    """Give this process, the first of a new process-id namespace, its own ``/tmp`` and ``/proc``.

    ``temporary``: the paths in ``/tmp`` that `make_root` returned, which stay readable.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    own_files = sum(len(Path(path).parts) for path in temporary)
    options = f"mode=0777,size={file_bytes},nr_inodes={files + 1 + own_files}"
    kernel.mount("/tmp", _UNDER_TMP, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags=flags, options=options)
    for path in temporary:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(path.replace("/tmp", _UNDER_TMP, 1), path)
    kernel.mount("proc", "/proc", "proc", flags=flags | kernel.MS_NOEXEC, options="subset=pid")
    os.chdir("/tmp")


def become_nobody() -> None:
    """Take from this process all rights over its namespaces. Each snippet gets its own user
    namespace, so that the kernel counts its processes separately."""
    if os.geteuid() == 0:
        os.setresgid(USER_ID, USER_ID, USER_ID)
        os.setresuid(USER_ID, USER_ID, USER_ID)
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # changing the user id has reset it
    Path("/proc/self/setgroups").write_text("deny")
    for name in ("uid_map", "gid_map"):
        Path("/proc/self", name).write_text(f"{USER_ID} {USER_ID} 1")


def _maps_nobody(name: str) -> bool:
    """Whether the user id `_NOBODY` exists here: this process may already be in a namespace."""
    for line in Path("/proc/self", name).read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= _NOBODY < first + count:
            return True
    return False


def _start_id_writer(can_be_nobody: bool) -> tuple[int, int]:
    """Start a process that maps this process's user and group ids once the returned descriptor is
    closed. Returns its pid, too."""
    owner = Path("/proc", str(os.getpid()))
    waiting, unshared = os.pipe()
    pid = os.fork()
    if pid:
        os.close(waiting)
        return pid, unshared
    status = 0
    try:
        os.close(unshared)
        os.read(waiting, 1)
        if not can_be_nobody:
            (owner / "setgroups").write_text("deny")
        for name, own in (("uid_map", os.getuid()), ("gid_map", os.getgid())):
            nobody = f"0 {own} 1\n{USER_ID} {_NOBODY} 1"
            (owner / name).write_text(nobody if can_be_nobody else f"{USER_ID} {own} 1")
    except OSError as error:
        status = error.errno or 1
    finally:
        os._exit(status)


def _make_small_files() -> None:
    for name in ("tmp", "proc", "dev", "etc"):
        os.mkdir(f"/{name}")
    for name, text in _NAMES.items():
        Path("/", name).write_text(text)
    for name, target in _LINKS.items():
        os.symlink(target, f"/{name}")
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"/dev/{name}", devices=True)
    _bind("/etc/ld.so.cache", "/etc/ld.so.cache")


def _bind(source: str, place: str, *, devices: bool = False) -> None:
    """Mount a file or folder of the old root at ``place``, read-only, without symbolic links."""
    if os.path.isdir(f"/old{source}"):
        os.makedirs(place)
    elif os.path.exists(f"/old{source}"):
        os.makedirs(os.path.dirname(place), exist_ok=True)
        Path(place).touch()
    else:
        return
    kernel.mount(f"/old{source}", place, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(place, devices=devices)


_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_MASKED_EQUAL = 7
_OPTIMIZE, _BINARY_TREE = 8, 2
_NEW_NAMESPACES = 0x7E020080  # the flags of clone that make namespaces
_CLONE_FILES, _CLONE_THREAD = 0x00000400, 0x00010000
_ALL_BITS = (1 << 64) - 1
_AF_UNIX = 1
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000

_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek
copy_file_range creat close close_range stat fstat lstat newfstatat statx statfs
fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd chdir fchdir
mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat
ftruncate fsync fdatasync flock dup dup2 dup3 pipe pipe2 poll ppoll select pselect6
epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4 umask fadvise64 readahead getxattr
lgetxattr fgetxattr listxattr llistxattr flistxattr munmap mremap mprotect madvise brk msync
mincore get_mempolicy rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend
rt_sigtimedwait sigaltstack pause alarm getitimer setitimer timer_create timer_settime timer_gettime
timer_delete timer_getoverrun clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time
times getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgid
getpgrp getsid setsid setpgid getrusage getrlimit setrlimit sysinfo uname getrandom getpriority
getcpu sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max
sched_get_priority_min futex futex_waitv set_robust_list get_robust_list set_tid_address arch_prctl
rseq membarrier execve wait4 waitid exit exit_group restart_syscall recvmsg recvfrom shutdown
getsockopt getsockname getpeername
"""
# Calls that reach other processes and files: allowed if a snippet sees only its own.
_IN_NAMESPACES = """
fork vfork kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal
open openat openat2 truncate fallocate chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat
utime utimes utimensat futimesat
"""
# Landlock does not restrict changes of the rights and times of files. So these calls do nothing;
# they report success, so that programs that copy files go on.
_WITHOUT_EFFECT = "chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat"
_REFUSED = "socket ptrace"  # fail with EPERM, as without permission
# Fail as on file systems without extended attributes, which programs that copy files accept.
_UNSUPPORTED = "setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr"
_REFUSED_ELSEWHERE = "kill fork vfork chown fchown lchown fchownat truncate"
# Index of an argument, mask, and the allowed values of the masked argument. This excludes commands
# by which the kernel sends signals or enlarges its buffers, and calls that affect another process.
# Shared memory without a file is not allowed, because it stays in use after most of it is unmapped;
# nor are huge pages, because no counter includes them.
_ONLY = {
    "fcntl": (1, _ALL_BITS, (*range(8), 9, 36, 37, 38, 1030, 1032, 1034)),
    "ioctl": (1, _ALL_BITS, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    "mmap": (3, _MAP_SHARED | _MAP_ANONYMOUS | _MAP_HUGETLB, (0, _MAP_SHARED, _MAP_ANONYMOUS)),
    "prlimit64": (0, _ALL_BITS, (0,)),
    "sendto": (4, _ALL_BITS, (0,)),  # without an address: only for connected sockets
    "socketpair": (0, _ALL_BITS, (_AF_UNIX,)),
}
# O_TRUNC is allowed only when opening for writing: before Linux 6.2, Landlock does not check it.
_EMPTYING = (os.O_TRUNC | os.O_ACCMODE, (*range(3), *(os.O_TRUNC | mode for mode in (1, 2))))
# prctl for names, signals at a parent's death, and rights that are already dropped; not for huge
# pages.
_ONLY_IN_NAMESPACES = {"prctl": (0, _ALL_BITS, (1, 2, 3, 4, 15, 16, 23, 36, 37, 38, 39))}
_ONLY_ELSEWHERE = {"open": (1, *_EMPTYING), "openat": (2, *_EMPTYING)}


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


class SyscallFilter:
    """A filter of system calls, which is made once and loaded by each process of a snippet.

    ``own_machine``: the snippet has namespaces, and sees only its own processes and files. Raises
    OSError: this machine has no libseccomp.
    """

    def __init__(self, *, own_machine: bool) -> None:
        self._library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        self._library.seccomp_init.restype = ctypes.c_void_p
        context = self._library.seccomp_init(_ERRNO | errno.ENOSYS)
        self._context = ctypes.c_void_p(context)
        self._library.seccomp_attr_set(self._context, _OPTIMIZE, _BINARY_TREE)
        self._rules(_ALLOW, _ALLOWED)
        self._rules(_ERRNO | errno.EPERM, _REFUSED)
        self._rules(_ERRNO | errno.ENOTSUP, _UNSUPPORTED)
        only = _ONLY | (_ONLY_IN_NAMESPACES if own_machine else _ONLY_ELSEWHERE)
        for name, (argument, mask, values) in only.items():
            for value in values:
                self._rule(_ALLOW, name, _Comparison(argument, _MASKED_EQUAL, mask, value))
        # `clone` may make threads, which share the process's descriptors; with namespaces also
        # processes.
        thread = _CLONE_THREAD | _CLONE_FILES
        kinds = [(_NEW_NAMESPACES | thread, thread)]
        if own_machine:
            self._rules(_ALLOW, _IN_NAMESPACES)
            kinds.append((_NEW_NAMESPACES | _CLONE_THREAD, 0))
        else:
            self._rules(_ERRNO | 0, _WITHOUT_EFFECT)
            self._rules(_ERRNO | errno.EPERM, _REFUSED_ELSEWHERE)
        for mask, value in kinds:
            self._rule(_ALLOW, "clone", _Comparison(0, _MASKED_EQUAL, mask, value))
        self._program: bytes | None = None
        if own_machine:
            with open(os.memfd_create("filter"), "rb") as file:
                _check(self._library.seccomp_export_bpf(self._context, file.fileno()), "seccomp")
                file.seek(0)
                self._program = file.read()

    def load(self) -> None:
        """Apply the filter to this process and all processes that it starts, irrevocably."""
        if self._program is not None:
            kernel.filter_system_calls(self._program)
            return
        # The process may signal only itself.
        own = _Comparison(0, _MASKED_EQUAL, _ALL_BITS, os.getpid())
        self._rule(_ALLOW, "tgkill", own)
        _check(self._library.seccomp_load(self._context), "seccomp")

    def _rules(self, action: int, names: str) -> None:
        for name in names.split():
            self._rule(action, name)

    def _rule(self, action: int, name: str, *comparisons: _Comparison) -> None:
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # this machine does not have the call, or this libseccomp does not know it
            return
        array = (_Comparison * len(comparisons))(*comparisons)
        failed = self._library.seccomp_rule_add_array(
            self._context, ctypes.c_uint32(action), number, len(comparisons), array
        )
        _check(failed, f"seccomp rule for {name}")


def _check(failed: int, what: str) -> None:
    if failed:
        raise OSError(-failed, f"{what}: {os.strerror(-failed)}")
