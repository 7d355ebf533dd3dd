"""Which policy version each token was sampled under.

Weights change only at a pull, so noting the length of every unfinished request there is exact.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchtitan_rl.types import VersionRun


def add_run(runs: tuple[VersionRun, ...], *, length: int, version: int) -> tuple[VersionRun, ...]:
    """``runs`` after a pull of ``version`` when ``length`` tokens had been sampled.

    A run in which nothing was sampled disappears; a pull of the version that is already there
    changes nothing.
    """
    kept = tuple(run for run in runs if run.start < length)
    if kept and kept[-1].version == version:
        return kept
    return (*kept, VersionRun(length, version))


def join_runs(
    first: tuple[VersionRun, ...], second: tuple[VersionRun, ...], *, length: int
) -> tuple[VersionRun, ...]:
    """The runs of ``length`` tokens, and of what was sampled behind them, as those of the whole."""
    runs = list(first)
    for start, version in second:
        if not runs or runs[-1].version != version:
            runs.append(VersionRun(length + start, version))
    return tuple(runs)


class VersionLedger:
    """The version runs of every unfinished request."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._runs: dict[str, tuple[VersionRun, ...]] = {}

    def admit(self, request_id: str) -> None:
        self._runs[request_id] = (VersionRun(0, self.version),)

    def pull(self, version: int, lengths: Mapping[str, int]) -> None:
        """Note a pull; ``lengths`` are the tokens sampled so far, by unfinished request."""
        self.version = version
        for request_id, length in lengths.items():
            self._runs[request_id] = add_run(self._runs[request_id], length=length, version=version)

    def so_far(self, request_id: str, num_tokens: int) -> tuple[VersionRun, ...]:
        """The runs of an unfinished request that has ``num_tokens``."""
        return tuple(run for run in self._runs[request_id] if run.start < num_tokens)

    def finish(self, request_id: str, num_tokens: int) -> tuple[VersionRun, ...]:
        """The runs of a request that ended with ``num_tokens``; it is forgotten here."""
        return tuple(run for run in self._runs.pop(request_id) if run.start < num_tokens)
