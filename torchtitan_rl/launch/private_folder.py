"""A temporary folder that no other user of the machine can enter: `use_private_folder`.

torch, vLLM and Monarch put sockets, locks and caches into the temporary folder, some under names
that others can guess, and open to whom the umask lets. Other users could connect to these, or be
there first with a link.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from torchtitan_rl.weights.leftovers import FolderGuard

_VARIABLE = "TORCHTITAN_RL_TMPDIR"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_MAX_ROOT = 40  # characters: a socket's path may have 107, and vLLM's names in it have 37


def use_private_folder() -> Path:
    """Make the temporary folder of this process, and of those that it starts from now on, a private
    one. It is removed when this process ends. In a process that was started so nothing happens.

    What torch compiles outlives it, in the user's cache, where there is one.
    """
    folder = os.environ.get(_VARIABLE, "")
    if not folder or folder != os.environ.get("TMPDIR"):
        root = tempfile.gettempdir()
        folder = tempfile.mkdtemp(
            prefix="torchtitan-rl-", dir=root if len(os.fsencode(root)) <= _MAX_ROOT else "/tmp"
        )
        FolderGuard([Path(folder)])
        os.environ["TMPDIR"] = os.environ[_VARIABLE] = tempfile.tempdir = folder
        with suppress(OSError, RuntimeError):  # a user without a home folder, as in containers
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            compiled = cache / "torchtitan-rl" / "torchinductor"
            compiled.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.environ.setdefault(_COMPILED, str(compiled))
    return Path(folder)
