"""The system calls that a snippet may make, as a seccomp filter made by libseccomp.

What is not in the list fails, as it does on a kernel that lacks it: namespaces, mounts, tracing,
keys, shared memory without a file, io_uring, and every call that is new.
"""

from __future__ import annotations

import ctypes
import errno
import os

from torchtitan_rl.sandbox import kernel

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_MASKED_EQUAL = 7
_OPTIMIZE, _BINARY_TREE = 8, 2
_NEW_NAMESPACES = 0x7E020080  # the flags of clone that make one
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
# What reaches other processes and files: only where a snippet sees none but its own.
_IN_NAMESPACES = """
fork vfork kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal
open openat openat2 truncate fallocate chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat
utime utimes utimensat futimesat
"""
# Landlock leaves rights and times of all files to their owner. These calls succeed, and change
# nothing, so that programs that copy files go on.
_WITHOUT_EFFECT = "chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat"
_REFUSED = "socket ptrace"  # as they are without the right to it
# As on file systems without them, which programs that copy files know.
_UNSUPPORTED = "setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr"
_REFUSED_ELSEWHERE = "kill fork vfork chown fchown lchown fchownat truncate"
# Argument, mask, and the values allowed of what the mask leaves. Commands that have the kernel send
# signals or enlarge its buffers are left out, as are calls for another process. Shared memory
# without a file stays in use when hardly any of it is mapped, huge pages are counted nowhere.
_ONLY = {
    "fcntl": (1, _ALL_BITS, (*range(8), 9, 36, 37, 38, 1030, 1032, 1034)),
    "ioctl": (1, _ALL_BITS, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    "mmap": (3, _MAP_SHARED | _MAP_ANONYMOUS | _MAP_HUGETLB, (0, _MAP_SHARED, _MAP_ANONYMOUS)),
    "prlimit64": (0, _ALL_BITS, (0,)),
    "sendto": (4, _ALL_BITS, (0,)),  # no address: only what is connected
    "socketpair": (0, _ALL_BITS, (_AF_UNIX,)),
}
# To empty a file it must be opened for writing, which Linux before 6.2 does not ask for.
_EMPTYING = (os.O_TRUNC | os.O_ACCMODE, (*range(3), *(os.O_TRUNC | mode for mode in (1, 2))))
# Names, signals at a parent's death, and rights that are gone; but no huge pages.
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
    """Made once, and loaded by each process that it is to bind.

    ``own_machine``: whether a snippet has namespaces, and sees no processes and files but its own.

    Raises:
        OSError: there is no libseccomp here.
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
        # Threads are clones of a kind that no new process is, and share descriptors.
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
        self._program = self._compiled() if own_machine else None

    def load(self) -> None:
        """Bind this process and all that it starts, for good."""
        if self._program is not None:
            kernel.filter_system_calls(self._program)
            return
        # Itself is all that it may signal.
        own = _Comparison(0, _MASKED_EQUAL, _ALL_BITS, os.getpid())
        self._rule(_ALLOW, "tgkill", own)
        _check(self._library.seccomp_load(self._context), "seccomp")

    def _compiled(self) -> bytes:
        """The filter as the kernel has it, which takes libseccomp some milliseconds."""
        with open(os.memfd_create("filter"), "rb") as file:
            _check(self._library.seccomp_export_bpf(self._context, file.fileno()), "seccomp")
            file.seek(0)
            return file.read()

    def _rules(self, action: int, names: str) -> None:
        for name in names.split():
            self._rule(action, name)

    def _rule(self, action: int, name: str, *comparisons: _Comparison) -> None:
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # there is none on this machine, or this libseccomp does not know it
            return
        array = (_Comparison * len(comparisons))(*comparisons)
        failed = self._library.seccomp_rule_add_array(
            self._context, ctypes.c_uint32(action), number, len(comparisons), array
        )
        _check(failed, f"seccomp rule for {name}")


def _check(failed: int, what: str) -> None:
    if failed:
        raise OSError(-failed, f"{what}: {os.strerror(-failed)}")
