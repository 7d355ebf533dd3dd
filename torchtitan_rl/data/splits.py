"""Which split a problem belongs to: decided by its text, so that equal ones are in the same."""

from __future__ import annotations

from hashlib import blake2b

from torchtitan_rl.rollout.task import Split


def in_split(split: Split, text: str, validation_share: float) -> bool:
    """The same for the same text, in every run."""
    digest = blake2b(text.encode(), digest_size=6).digest()
    is_validation = int.from_bytes(digest, "big") / 2**48 < validation_share
    return is_validation == (split == "validation")
