"""``manifest.json``: size and checksum of each file that a run, or an evaluation, has left behind.

Invariants: it is written when the folder does not change any more, and removed before it changes
again; it is there whole or not at all. So a folder without it belongs to a run that goes on or was
killed. A checkpoint is listed by its marker, which lists its files.

A digest of all of a policy, its weights included: what two hosts, or two evaluations, must have
alike. (`policy_fingerprint`, by which a run knows its own policy again, reads little of them.)
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_rl.config.checks.paths import IDENTITY_FILE, SETTINGS_FILE
from torchtitan_rl.config.checks.resume import policy_fingerprint, weight_files
from torchtitan_rl.files import replace_file
from torchtitan_rl.training.checkpoint_files import MARKER, fingerprint

MANIFEST = "manifest.json"
_LISTED = (
    IDENTITY_FILE,
    SETTINGS_FILE,
    "results.json",
    "metrics*.jsonl",
    "**/rollouts*.jsonl",
    "journal.sqlite",
    f"checkpoints/*/{MARKER}",
    "policy/**/*",
)
FIXES = {
    "policy/": "restore it, or remove policy/ and resume the run, which exports it again",
    "checkpoints/": "restore the checkpoint; resumed without it, a run continues from an older one",
}
_FIX = "restore it from a copy"


def write_manifest(folder: Path) -> None:
    """
    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    files = {name: asdict(fingerprint(folder / name)) for name in _listed(folder)}
    document = {"files": files, "crc32": _checksum(files)}
    replace_file(folder / MANIFEST, json.dumps(document, indent=2).encode() + b"\n")


def remove_manifest(folder: Path) -> None:
    """
    Raises:
        OSError: it cannot be removed.
    """
    (folder / MANIFEST).unlink(missing_ok=True)


def compare_with_manifest(folder: Path) -> tuple[int, list[str]]:
    """The number of files in the manifest, and a line for each one that is not as it was left;
    (0, []) where there is none.

    Raises:
        OSError: a file cannot be read.
    """
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        files: dict[str, Any] = document["files"]
        if document["crc32"] != _checksum(files):
            raise ValueError("wrong checksum")
    except FileNotFoundError:
        return 0, []
    except (ValueError, KeyError, TypeError) as error:
        return 0, [f"{MANIFEST} is damaged ({error!r}): {_FIX}"]
    found = _listed(folder)
    errors = [f"{name} was added after the end: remove it" for name in found if name not in files]
    for name, record in files.items():
        fix = next((fix for start, fix in FIXES.items() if name.startswith(start)), _FIX)
        if name not in found:
            errors.append(f"{name} was removed after the end: {fix}")
        elif asdict(fingerprint(folder / name)) != record:
            errors.append(f"{name} was changed after the end: {fix}")
    return len(files), errors


def _listed(folder: Path) -> list[str]:
    paths = {path for pattern in _LISTED for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _checksum(files: Any) -> int:
    return zlib.crc32(json.dumps(files).encode())


LEAST_BYTES_PER_S = 200 << 20  # what the storage of weights is trusted to read


def policy_digest(policy_dir: Path) -> str:
    """Reads whole weight files, about 5 GB/s where they are in memory; each once in a process,
    unless it changes.

    Raises:
        OSError, ValueError: the policy's files cannot be read.
    """
    digest = hashlib.sha256(policy_fingerprint(policy_dir).encode())
    for path in weight_files(policy_dir):
        found = path.stat()
        digest.update(_file_digest(os.path.realpath(path), found.st_size, found.st_mtime_ns))
    return digest.hexdigest()


def digest_limit_s(policy_dir: Path) -> float:
    """How long that may take on another host.

    Raises:
        OSError: the policy's files cannot be read.
    """
    return sum(path.stat().st_size for path in weight_files(policy_dir)) / LEAST_BYTES_PER_S


@lru_cache(maxsize=1024)
def _file_digest(path: str, size: int, mtime_ns: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()
