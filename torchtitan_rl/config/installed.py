"""What a machine has installed, and how it differs from what another one has.

A run's processes on other hosts unpickle what the controller sends: both sides need the same code.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_USERS_OF_THE_PACKAGE = ("experiments", "configs")  # only the controller imports them
_LIBRARIES = ("torch", "vllm", "torchtitan", "torchmonarch", "transformers")
_CODE = "code of torchtitan-rl"


@functools.cache
def installed() -> dict[str, str]:
    """Versions by name, and a digest of this package's code."""
    versions = {"torchtitan-rl": _version("torchtitan-rl"), "Python": platform.python_version()}
    versions |= {name: _version(name) for name in _LIBRARIES}
    return versions | {_CODE: code_digest(_PACKAGE)}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """One message for each name that differs: ``torch 2.12.0, and the controller has 2.13.0``."""
    found = [
        f"{name} {there.get(name, 'of an unknown version')}, and the controller has {version}"
        for name, version in here.items()
        if there.get(name) != version
    ]
    # Another version has other code anyway.
    return found[:-1] if len(found) > 1 and found[-1].startswith(_CODE) else found


def code_digest(package: Path) -> str:
    """Of the names and contents of all Python files of a package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        if inner.parts[0] not in _USERS_OF_THE_PACKAGE:
            digest.update(f"{inner}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _version(name: str) -> str:
    """Without what says which accelerator it is built for (``2.13.0+cpu``)."""
    for distribution in (name, f"{name}-cpu"):
        try:
            return metadata.version(distribution).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return "none"
