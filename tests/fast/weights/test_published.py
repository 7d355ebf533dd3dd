"""Pins of published versions."""

from __future__ import annotations

import doctest

import pytest

from torchtitan_rl.weights import published
from torchtitan_rl.weights.published import PublishedVersions, given_up


def test_a_pinned_version_is_kept_until_its_last_holder_releases_it() -> None:
    versions = PublishedVersions()
    assert (versions.current, versions.kept()) == (None, frozenset())
    versions.advance(3)
    first = versions.pin(3)
    versions.advance(4)
    second = versions.pin(3)  # no longer current, but held by the first
    first()
    first()  # releasing twice takes nothing from the second
    assert (versions.current, versions.kept()) == (4, {3})
    second()
    assert versions.kept() == frozenset()


def test_only_a_version_that_certainly_stays_readable_can_be_pinned() -> None:
    versions = PublishedVersions()
    with pytest.raises(ValueError, match="version 0 cannot be pinned: current is None"):
        versions.pin(0)
    versions.advance(1)
    release = versions.pin(1)
    versions.advance(2)
    release()
    for version in (1, 3):
        with pytest.raises(ValueError, match="current is 2, pinned are none"):
            versions.pin(version)


def test_a_version_pinned_while_the_next_one_is_being_published_stays_readable() -> None:
    """An evaluation begins while a version is being published."""
    versions, held = PublishedVersions(), [0]
    versions.advance(0)
    keep = versions.kept()  # publishing of 1 begins
    release = versions.pin(0)
    held = [v for v in held if v not in given_up(held, keep)] + [1]
    versions.advance(1)
    for version in (2, 3):
        held = [v for v in held if v not in given_up(held, versions.kept())] + [version]
        versions.advance(version)
    assert held == [0, 2, 3]
    release()
    assert given_up(held, versions.kept()) == [0, 2]


def test_all_versions_but_the_newest_and_the_kept_ones_are_released() -> None:
    assert doctest.testmod(published) == (0, 1)  # failed, attempted
