"""The process from which snippets are forked; Python is running and the `preload` modules are
imported.

`main` is called in a new process with a socket of the `Sandbox`. It writes one JSON line, which
says that it is ready or why it cannot start. Then it receives one message with a descriptor for
each snippet, makes the message's ``prepared`` object, and forks a `keeper` that serves the snippet.
It ends when the other end of the socket is closed. With namespaces this process is the first one of
its process-id namespace, so when it ends, all processes that were forked from it end, too. This
process never receives a policy's text.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from torchtitan_rl.sandbox import kernel, namespaces
from torchtitan_rl.sandbox.keeper import keep
from torchtitan_rl.sandbox.namespaces import SyscallFilter

MESSAGE_BYTES = 1 << 17


def main() -> None:
    """Run the zygote. ``sys.argv`` ends with the socket's descriptor and the `SandboxConfig` as
    JSON."""
    control = socket.socket(fileno=int(sys.argv[-2]))
    control.set_inheritable(False)
    settings = json.loads(sys.argv[-1])
    has_own_ids = settings["isolation"] == "namespaces"
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        system_calls = SyscallFilter(own_machine=has_own_ids)
        if has_own_ids:
            namespaces.enter()
            _continue_in_child(control)
        elif settings["isolation"] == "landlock":
            kernel.landlock_version()  # raises if the kernel has no Landlock
        settings["zygote"] = os.pidfd_open(os.getpid())
        own_path, sys.path = sys.path, settings["path"]
        for name in settings["preload"]:
            import_module(name)
        sys.path = own_path
        if has_own_ids:
            settings["temporary"] = namespaces.make_root(settings["readable"])
        own_ids = os.open("/proc/self/ns/pid", os.O_RDONLY) if has_own_ids else None
    except Exception as error:
        is_import = isinstance(error, ImportError)
        _say(control, error=f"{type(error).__name__}: {error}", is_import=is_import)
        raise SystemExit(1) from None
    _say(control, ready=True)
    _serve(control, settings, system_calls, own_ids)


def _say(link: socket.socket, **message: Any) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def _continue_in_child(control: socket.socket) -> None:
    """Fork. The child continues, as process 1 of the new namespace; this process waits for its
    end."""
    pid = os.fork()
    if pid:
        control.close()
        _, status = os.waitpid(pid, 0)
        os._exit(0 if status == 0 else 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(
    control: socket.socket,
    settings: dict[str, Any],
    system_calls: SyscallFilter,
    own_ids: int | None,
) -> NoReturn:
    """Fork keepers until the socket is closed. ``own_ids``: this process's process-id namespace, if
    snippets have their own."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are never waited for
    gc.collect()
    gc.freeze()  # forked processes share this memory until they write to it
    kernel.join_pages()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
        if not descriptors:
            os._exit(0)
        link = socket.socket(fileno=descriptors[0])
        try:
            wanted = json.loads(message)
            settings["prepared"] = wanted and _prepare(*wanted)
            sys.stdout.flush()  # otherwise the snippet would inherit what `_prepare` printed
            if own_ids is not None:
                kernel.setns(own_ids, kernel.CLONE_NEWPID)  # undoes the last unshare
                kernel.unshare(kernel.CLONE_NEWPID)
            if os.fork() == 0:
                control.close()
                keep(link, settings, system_calls)
        except Exception as error:
            _say(link, error=" ".join(f"{type(error).__name__}: {error}".split()))
        link.close()


def _prepare(name: str, args: Sequence[Any] | None) -> Any:
    """The object ``module:attribute``, or with arguments its result when it is called."""
    module, _, attribute = name.partition(":")
    found = getattr(sys.modules[module], attribute)
    return found if args is None else found(*args)
