"""A recorder that retries: a row that could not be written is written before the next one.

Invariants: rows are written in order and once each. No checkpoint is taken while a row is missing
(`flush` comes before it), so a resumed run has the rows of all steps that it does not repeat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from torchtitan_rl.errors import OutputError
from torchtitan_rl.orchestration.records import (
    AccountRecord,
    EvaluationRecord,
    Recorder,
    StepRecord,
)

_MAX_UNWRITTEN = 64  # each record holds the groups of its step


class RetryingRecorder:
    """The `Recorder` that the controller's loops use."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._unwritten: deque[Callable[[], None]] = deque()

    def record_step(self, record: StepRecord) -> None:
        self._write(lambda: self._recorder.record_step(record))

    def record_evaluation(self, record: EvaluationRecord) -> None:
        self._write(lambda: self._recorder.record_evaluation(record))

    def record_account(self, record: AccountRecord) -> None:
        self._write(lambda: self._recorder.record_account(record))

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.phase(name)

    def say(self, message: str) -> None:
        self._recorder.say(message)

    def flush(self) -> None:
        """Write all missing rows.

        Raises:
            OutputError: a row still cannot be written.
        """
        while self._unwritten:
            self._unwritten[0]()
            self._unwritten.popleft()

    def _write(self, write: Callable[[], None]) -> None:
        self._unwritten.append(write)
        try:
            self.flush()
        except OutputError as error:
            if len(self._unwritten) >= _MAX_UNWRITTEN:
                raise
            self.say(
                f"{len(self._unwritten)} rows could not be written and will be retried: {error}"
            )
