"""What snippets see of the machine: namespaces of their own, and a root with little in it.

`enter` and `make_root` are called once, by the processes that all snippets descend from,
`enter_private` and `become_nobody` for each snippet. The root has the system's libraries, Python
and its packages, for reading only; there is no network device. `close_files` leaves as much to a
snippet without namespaces.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchtitan_rl.sandbox import kernel

USER_ID = 1000  # of snippets, as they see it
_NOBODY = 65534  # as which they run where the sandbox's owner is root
_UNDER_TMP = "/shown"  # what was in /tmp before a snippet got its own
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives")
_DEVICES = ("null", "full", "random", "urandom")  # a mapping of zero is shared memory
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
    """Move this process (as to process ids, the next one it forks) into new namespaces.

    All its rights end there. Where the owner is root, snippets are another user.
    """
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
    """Instead of a root of its own: leave to this process what such a root would have had."""
    system = filter(os.path.exists, (*_SYSTEM, "/etc/ld.so.cache"))
    devices = [f"/dev/{name}" for name in _DEVICES]
    shown = {*system, sys.base_prefix, sys.prefix, *readable}
    kernel.restrict_files(shown, (*devices, os.getcwd()))


def make_root(readable: Iterable[str]) -> list[str]:
    """A file system in memory becomes the root, with parts of the old one bound into it.

    Returns:
        What of that is in ``/tmp``, for `enter_private`.

    Raises:
        OSError: there is no such path, or it is ``/tmp`` itself.
    """
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
    for path in sorted(shown, key=len):  # what is below a shown folder is there already
        for place in (shown[path], path):
            if not os.path.lexists(place):
                _bind(shown[path], place)
                if Path(place).is_relative_to("/tmp"):
                    temporary.append(place)
    os.mkdir(_UNDER_TMP)
    kernel.mount("proc", "/proc", "proc")  # no later one is allowed without a first
    kernel.unmount("/old")
    os.rmdir("/old")
    kernel.make_read_only("/", recursive=False)
    return temporary


def enter_private(file_bytes: int, files: int, temporary: Sequence[str]) -> None:
    """Give this process, the first of a new process-id namespace, a ``/tmp`` and ``/proc``.

    ``temporary``: what it is shown in ``/tmp``.
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
    """Take from this process all rights over its namespaces.

    A user namespace of its own makes the kernel count its processes apart from all others.
    """
    if os.geteuid() == 0:
        os.setresgid(USER_ID, USER_ID, USER_ID)
        os.setresuid(USER_ID, USER_ID, USER_ID)
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # which another user id takes away
    Path("/proc/self/setgroups").write_text("deny")
    for name in ("uid_map", "gid_map"):
        Path("/proc/self", name).write_text(f"{USER_ID} {USER_ID} 1")


def _maps_nobody(name: str) -> bool:
    """Whether there is such a user where this process is, which may be a namespace already."""
    for line in Path("/proc/self", name).read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= _NOBODY < first + count:
            return True
    return False


def _start_id_writer(can_be_nobody: bool) -> tuple[int, int]:
    """The pid of a process that maps the ids of this one when the descriptor is closed."""
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
    """Show, for reading, a file or folder of the old root, which is free of symbolic links."""
    if os.path.isdir(f"/old{source}"):
        os.makedirs(place)
    elif os.path.exists(f"/old{source}"):
        os.makedirs(os.path.dirname(place), exist_ok=True)
        Path(place).touch()
    else:
        return
    kernel.mount(f"/old{source}", place, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(place, devices=devices)
