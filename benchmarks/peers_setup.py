"""A virtual environment with TRL that adds to the running environment.

The new environment sees the packages of the running environment (torch, transformers, ...) except
vLLM. Only the packages that TRL needs in addition are installed, and only into the new environment.
The requirement is the extra ``peers`` of pyproject.toml. Only a folder that this module made is
deleted; a stamp in the folder shows this.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.training_runs import ROOT

_STAMP = "requirements.txt"
_FIRST_WORD = "running: "  # the beginning of a stamp
_UNFINISHED = "not finished"
# TRL 1.16 does not support our vLLM; it would import it nevertheless, which takes many seconds.
_HIDE = "import sys; sys.modules['vllm'] = None"


def peers_python(folder: Path, needed: Sequence[str]) -> Path:
    """Return the interpreter of the environment in ``folder``. If the environment is missing, make
    it and install the packages that are ``needed``.

    Raises:
        SystemExit: something cannot be installed, or `require_replaceable` refuses the folder.
    """
    folder = folder.absolute()
    require_replaceable(folder)
    python, stamp = folder / "bin" / "python", folder / _STAMP
    wanted = [f"{_FIRST_WORD}{sys.prefix}", _HIDE, *needed]
    if stamp.exists() and stamp.read_text().splitlines() == wanted:
        return python
    print(f"making {folder} with {', '.join(needed)}", file=sys.stderr)
    venv.EnvBuilder(with_pip=False, clear=True, symlinks=True).create(folder)
    stamp.write_text(f"{wanted[0]}\n{_UNFINISHED}\n")  # even if the rest fails, the folder is ours
    scheme = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    (packages / "running.pth").write_text(f"{_HIDE}\n{sysconfig.get_path('purelib')}\n")
    words = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "install"]
    done = subprocess.run(
        [*words, *needed], capture_output=True, text=True, check=False, timeout=1200
    )
    if done.returncode:
        raise SystemExit(
            f"{', '.join(needed)} cannot be installed into {folder}: the comparison needs "
            f"a package index that pip reaches (see `pip config list`). pip said:\n{done.stderr}"
        )
    stamp.write_text("\n".join(wanted) + "\n")
    return python


def require_replaceable(folder: Path) -> None:
    """
    Raises:
        SystemExit: ``folder`` has files, and was not made here.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise SystemExit(f"{folder} is no folder: name one for the environment with TRL")
    stamp = folder / _STAMP
    is_ours = stamp.is_file() and stamp.read_bytes().startswith(_FIRST_WORD.encode())
    if not is_ours and any(folder.iterdir()):
        raise SystemExit(
            f"{folder} is not empty, and `benchmarks.peers` did not make it: an environment with "
            "TRL would replace all of it. Name another folder, or an empty one"
        )


def requirements() -> list[str]:
    """The packages that TRL's side needs: the extra ``peers``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"]["peers"])
