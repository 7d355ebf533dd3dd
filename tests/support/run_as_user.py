"""``python -m tests.support.run_as_user UID COMMAND...``: root runs a command as another user.

Folders of root that lead to Python and to this repository are shown to it, in mounts of its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from torchtitan_rl.sandbox import kernel

ROOT = Path(__file__).parents[2]


def main() -> None:
    try:
        _become(int(sys.argv[1]))
    except OSError as error:
        print(json.dumps({"unavailable": str(error)}))
        raise SystemExit(1) from None
    os.execvp(sys.argv[2], sys.argv[2:])


def _become(user: int) -> None:
    shown = {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, ROOT)}
    closed = {str(folder) for path in shown if (folder := _closed_folder(Path(path)))}
    if closed:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    for folder in closed:
        copy = tempfile.mkdtemp()
        kernel.mount("tmpfs", copy, "tmpfs", options="mode=0755")
        for path in shown:
            if Path(path).is_relative_to(folder):
                os.makedirs(f"{copy}/{path}")
                kernel.mount(path, f"{copy}/{path}", flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.mount(f"{copy}/{folder}", folder, flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.unmount(copy)
        os.rmdir(copy)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _closed_folder(path: Path) -> Path | None:
    """The first on the way to it that others may not enter."""
    for folder in reversed((path, *path.parents)):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


if __name__ == "__main__":
    main()
