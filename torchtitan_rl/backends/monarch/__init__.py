"""Monarch: actors, meshes, RDMA. Import this package before Monarch.

The package loads Monarch so that other users of the machine can neither connect to it nor redirect
its log.

A host of Monarch 0.7, and each start of a process, listens on an abstract Unix socket. Every user
of the machine can connect to such a socket, and a user who connects can run programs as this user.
Here each socket is a file in a private folder (`use_private_folder`). A process of Monarch also
logs to ``/tmp/USER/monarch_log.log``, where other users can put a link to another file. Here it
logs to its stderr.

Monarch has no settings for this. So this package redirects Monarch's calls of ``bind``, and its
calls of ``open64`` while it is loaded. Importing this package prepares this for any module that
imports Monarch later.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PYTHON_VARIABLE = "TORCHTITAN_RL_PYTHON"  # the Python interpreter of this host's processes

_MODULE = "monarch._rust_bindings"
_LOG = b"/monarch_log"
_ABSTRACT = socket.AF_UNIX.to_bytes(2, sys.byteorder) + b"\0"
_logs: list[int] = []  # descriptors that Monarch logs to


def log_to_stderr() -> None:
    """Redirect Monarch's log to this process's current stderr."""
    for descriptor in _logs:
        os.dup2(2, descriptor, inheritable=False)


class _MonarchFinder:
    """Finds Monarch's native module, and has it loaded by `_Loader`; see
    `importlib.abc.MetaPathFinder`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(ExtensionFileLoader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        from torchtitan_rl.launch.own_user import libc, replace_call, use_private_folder

        folder = os.fsencode(use_private_folder())
        os.environ[PYTHON_VARIABLE] = sys.executable

        @ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
        )
        def bind(descriptor: int, address: int, length: int) -> int:
            name = ctypes.string_at(address, length)
            if name.startswith(_ABSTRACT):
                name = name[:2] + folder + b"/" + secrets.token_hex(8).encode() + b"\0"
            return int(libc.bind(descriptor, name, len(name)))

        @ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, use_errno=True
        )
        def open64(path: bytes, flags: int, mode: int) -> int:
            if _LOG not in path:
                return int(libc.open64(path, flags, ctypes.c_uint(mode)))
            _logs.append(os.dup(2))
            return _logs[-1]

        replace_call(self.path, "bind", bind)
        restore = replace_call(self.path, "open64", open64)
        try:
            return super().create_module(spec)
        finally:
            restore()


if _MODULE in sys.modules:
    raise ImportError("import torchtitan_rl.backends.monarch before monarch, to close its sockets")
sys.meta_path.insert(0, _MonarchFinder)
