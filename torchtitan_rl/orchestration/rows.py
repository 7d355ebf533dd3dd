"""Rows on their way to the run's files: in order, each once, over failures to write them.

Invariant: no checkpoint is taken while a row waits (`flush` comes before it), so that a resumed run
has the rows of all steps that it does not take again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torchtitan_rl.errors import OutputError
from torchtitan_rl.orchestration.records import (
    AccountRecord,
    EvaluationRecord,
    Recorder,
    StepRecord,
)

_MAX_WAITING = 64  # they hold the groups of their steps


class Rows:
    """What the controller's loops record; one that cannot be written waits for the next one."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: deque[Callable[[], None]] = deque()

    def step(self, record: StepRecord) -> None:
        self._add(lambda: self._recorder.record_step(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._add(lambda: self._recorder.record_evaluation(record))

    def account(self, record: AccountRecord) -> None:
        self._add(lambda: self._recorder.record_account(record))

    def flush(self) -> None:
        """Write what waits.

        Raises:
            OutputError: it still cannot be written.
        """
        while self._waiting:
            self._waiting[0]()
            self._waiting.popleft()

    def _add(self, write: Callable[[], None]) -> None:
        self._waiting.append(write)
        try:
            self.flush()
        except OutputError as error:
            if len(self._waiting) >= _MAX_WAITING:
                raise
            self._recorder.say(
                f"{len(self._waiting)} rows could not be written and wait for the next: {error}"
            )
