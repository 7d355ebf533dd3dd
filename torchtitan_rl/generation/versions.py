"""Which policy version each token was sampled under.

Weights change only at a pull, so noting the length of every unfinished request there is exact.
"""

from __future__ import annotations

from torchtitan_rl.types import VersionRun


def add_run(runs: tuple[VersionRun, ...], *, length: int, version: int) -> tuple[VersionRun, ...]:
    """``runs`` after a pull of ``version`` when ``length`` tokens had been sampled.

    A run in which nothing was sampled disappears; a pull of the version that is already there
    changes nothing.
    """
    kept = runs_before(runs, length)
    if kept and kept[-1].version == version:
        return kept
    return (*kept, VersionRun(length, version))


def join_runs(
    first: tuple[VersionRun, ...], second: tuple[VersionRun, ...], *, length: int
) -> tuple[VersionRun, ...]:
    """The runs of ``length`` tokens, and of those sampled after them, as the runs of the whole."""
    runs = list(first)
    for start, version in second:
        if not runs or runs[-1].version != version:
            runs.append(VersionRun(length + start, version))
    return tuple(runs)


def runs_before(runs: tuple[VersionRun, ...], length: int) -> tuple[VersionRun, ...]:
    """The runs of the first ``length`` tokens."""
    return tuple(run for run in runs if run.start < length)
