"""Seeds of requests: the same in every run with the same seed, whatever else runs beside."""

from __future__ import annotations

from hashlib import blake2b


def request_seed(run_seed: int, rollout_id: str, turn: int, attempt: int = 0) -> int:
    """Seed of one turn's request, in [0, 2**63); independent of Python's own hash."""
    key = f"{run_seed}\x00{rollout_id}\x00{turn}"
    if attempt:
        key += f"\x00{attempt}"
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
