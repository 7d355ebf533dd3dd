"""Which published versions a publisher keeps."""

from __future__ import annotations


def versions_to_free(held: list[int], keep: frozenset[int]) -> list[int]:
    """The versions to release before one more is published, of those ``held``, oldest first: all
    but the newest and those in ``keep``.

    >>> versions_to_free([3, 4, 5], keep=frozenset({3}))
    [4]
    """
    return [version for version in held[:-1] if version not in keep]
