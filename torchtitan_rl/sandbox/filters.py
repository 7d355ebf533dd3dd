"""The system calls that a snippet may make, as a seccomp filter made by libseccomp.

What is not in the list fails, as it does on a kernel that lacks it: namespaces, mounts, tracing,
keys, shared memory without a file, io_uring, and every call that is new.
"""

from __future__ import annotations

import ctypes
import errno
import os

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EQUAL, _MASKED_EQUAL = 4, 7
_OPTIMIZE, _BINARY_TREE = 8, 2
_NEW_NAMESPACES = 0x7E020080  # the flags of clone that make one
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1

_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile
copy_file_range open openat openat2 creat close close_range stat fstat lstat newfstatat statx statfs
fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd chdir fchdir
mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat chmod
fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat truncate
ftruncate fallocate fsync fdatasync flock dup dup2 dup3 pipe pipe2 poll ppoll select pselect6
epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4 umask fadvise64 readahead getxattr
lgetxattr fgetxattr listxattr llistxattr flistxattr mmap munmap mremap mprotect madvise brk msync
mincore get_mempolicy rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend
rt_sigtimedwait sigaltstack pause alarm getitimer setitimer timer_create timer_settime timer_gettime
timer_delete timer_getoverrun clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time
times getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgid
getpgrp getsid setsid setpgid getrusage getrlimit setrlimit sysinfo uname getrandom getpriority
getcpu sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max
sched_get_priority_min futex futex_waitv set_robust_list get_robust_list set_tid_address arch_prctl
rseq membarrier execve wait4 waitid exit exit_group restart_syscall recvmsg recvfrom shutdown
getsockopt setsockopt getsockname getpeername
"""
# What reaches other processes: only where a snippet sees none but its own.
_PROCESSES = """
fork vfork kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal prctl
prlimit64 setpriority sched_setaffinity
"""
# Argument and its allowed values. Commands that have the kernel send signals are left out.
_ONLY = {
    "fcntl": (1, (*range(8), 9, 36, 37, 38, *range(1030, 1035))),
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    "socketpair": (0, (_AF_UNIX,)),
    "sendto": (4, (0,)),  # no address: only what is connected
}


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


class SyscallFilter:
    """Made once, and loaded by each process that it is to bind.

    ``processes``: whether to allow starting processes and sending them signals.

    Raises:
        OSError: there is no libseccomp here.
    """

    def __init__(self, *, processes: bool) -> None:
        self._library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        self._library.seccomp_init.restype = ctypes.c_void_p
        context = self._library.seccomp_init(_ERRNO | errno.ENOSYS)
        self._context = ctypes.c_void_p(context)
        self._library.seccomp_attr_set(self._context, _OPTIMIZE, _BINARY_TREE)
        for name in _ALLOWED.split() + (_PROCESSES.split() if processes else []):
            self._rule(_ALLOW, name)
        for name, (argument, values) in _ONLY.items():
            for value in values:
                self._rule(_ALLOW, name, _Comparison(argument, _EQUAL, value, 0))
        # Threads are clones of a kind that no new process is.
        kind = (_NEW_NAMESPACES, 0) if processes else (_CLONE_THREAD, _CLONE_THREAD)
        self._rule(_ALLOW, "clone", _Comparison(0, _MASKED_EQUAL, *kind))
        for name in ("socket", "ptrace") if processes else ("socket", "kill", "fork", "vfork"):
            self._rule(_ERRNO | errno.EPERM, name)
        self._processes = processes

    def load(self) -> None:
        """Bind this process and all that it starts, for good."""
        if not self._processes:  # itself, which is all that these may be called for
            for name, own in (("tgkill", os.getpid()), ("prlimit64", 0)):
                self._rule(_ALLOW, name, _Comparison(0, _EQUAL, own, 0))
        failed = self._library.seccomp_load(self._context)
        if failed:
            raise OSError(-failed, f"seccomp: {os.strerror(-failed)}")

    def _rule(self, action: int, name: str, *comparisons: _Comparison) -> None:
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # there is none on this machine, or this libseccomp does not know it
            return
        array = (_Comparison * len(comparisons))(*comparisons)
        failed = self._library.seccomp_rule_add_array(
            self._context, ctypes.c_uint32(action), number, len(comparisons), array
        )
        if failed:
            raise OSError(-failed, f"seccomp rule for {name}: {os.strerror(-failed)}")
