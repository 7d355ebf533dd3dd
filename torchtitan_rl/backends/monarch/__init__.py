"""Monarch: actors, meshes, RDMA. Import this package before Monarch, which it does not load.

This package changes how Monarch is loaded, so that other users of the machine can neither connect
to Monarch nor redirect its log. Monarch has no settings for this, so the package redirects calls
that Monarch makes of two C functions:

- ``bind``, permanently. Monarch 0.7 listens on an abstract Unix socket for each host and each
  process that it starts. Every user of the machine can connect to such a socket, and whoever
  connects can run programs with the rights of the user who started the run. With the redirected
  ``bind``, each socket is a file in a private folder (`use_private_folder`).
- ``open64``, only while Monarch's native module is being loaded. Monarch opens its log
  ``/tmp/USER/monarch_log.log`` then, where other users can put a link to another file. With the
  redirected ``open64``, Monarch logs to its process's stderr.
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
    """Finds Monarch's native module, and makes `_Loader` load it; see
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
