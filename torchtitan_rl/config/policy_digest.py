"""A digest of all of a policy, its weights included: what two hosts, or two evaluations, must have
alike. (`policy_fingerprint`, by which a run knows its own policy again, reads little of them.)"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

import xxhash

from torchtitan_rl.config.checks.resume import policy_fingerprint, weight_files

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
