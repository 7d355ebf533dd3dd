"""Trackers that fail, hang or have a full disk, behind their threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fast.test_files import files_of_at_most
from torchtitan_rl.config.checks import tracker_errors
from torchtitan_rl.config.run import TrackerName
from torchtitan_rl.observability import trackers as trackers_module
from torchtitan_rl.observability.trackers import TrackerThread, start_trackers

WAIT_S = 10.0


class Recording:
    """A tracker that raises for the steps in ``bad``. All of its kind share one journal."""

    def __init__(self, journal: list[Any], bad: Sequence[int] = ()) -> None:
        self.journal = journal
        self.bad = bad
        journal.append("open")

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        if step in self.bad:
            raise SystemExit(f"no\nstep {step}")
        self.journal.append((step, dict(metrics)))

    def record_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.journal.append((step, list(rows)))

    def close(self) -> None:
        self.journal.append("close")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_tracker_gets_everything_in_order_and_is_closed(caplog) -> None:
    journal: list[Any] = []
    thread = TrackerThread("t", lambda: Recording(journal))
    thread.record(1, {"a": 1.0})
    thread.record_rollouts(1, [{"text": "x"}])
    thread.record(2, {"a": 2.0})
    thread.close()
    assert journal == ["open", (1, {"a": 1.0}), (1, [{"text": "x"}]), (2, {"a": 2.0}), "close"]
    assert warnings_in(caplog) == []


def test_a_tracker_that_fails_is_opened_again_for_the_next_row_and_said_once(caplog) -> None:
    journal: list[Any] = []
    thread = TrackerThread("t", lambda: Recording(journal, bad=[2, 3]))
    for step in range(1, 5):
        thread.record(step, {})
    thread.close()
    assert journal == ["open", (1, {}), "close", "open", "close", "open", (4, {}), "close"]
    assert warnings_in(caplog) == ["t lacks data of this run: SystemExit: no step 2"]


def test_a_tracker_that_cannot_be_opened_costs_only_its_own_data(caplog) -> None:
    def refuse() -> Recording:
        raise ConnectionError("no such server")

    thread = TrackerThread("t", refuse)
    thread.record(1, {})
    thread.record(2, {})
    thread.close()
    assert warnings_in(caplog) == ["t lacks data of this run: ConnectionError: no such server"]


def test_a_tracker_that_hangs_delays_nothing(caplog, monkeypatch) -> None:
    monkeypatch.setattr(trackers_module, "_MAX_WAITING", 3)
    is_over = threading.Event()

    class Hanging(Recording):
        def record(self, step: int, metrics: Mapping[str, float]) -> None:
            is_over.wait(WAIT_S)

    thread = TrackerThread("t", lambda: Hanging([]))
    started_s = time.monotonic()
    for step in range(100):
        thread.record(step, {})
    thread.close(timeout_s=0.2)
    assert time.monotonic() - started_s < WAIT_S / 2
    is_over.set()
    assert warnings_in(caplog) == [
        "t lacks data of this run: 3 rows wait for it, and no more are kept"
    ]


def test_a_tracker_that_does_not_end_is_left_behind(caplog) -> None:
    is_over = threading.Event()

    class Endless(Recording):
        def close(self) -> None:
            is_over.wait(WAIT_S)

    thread = TrackerThread("t", lambda: Endless([]))
    thread.record(1, {})
    thread.close(timeout_s=0.2)
    is_over.set()
    assert warnings_in(caplog) == ["t lacks data of this run: it did not end within 0.2 s"]


def tensorboard_events(run_dir: Path) -> tuple[dict[int, float], list[int]]:
    """Scalars of all files by step, as TensorBoard's own reader gives them, and the steps from
    which on it hides what earlier files have."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    scalars, begun = dict[int, float](), list[int]()
    for path in sorted((run_dir / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                scalars[event.step] = value.tensor.float_val[0]
            begun += [event.step] * (event.session_log.status == SessionLog.START)
    return scalars, begun


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_on_a_full_disk_tensorboard_has_a_gap(tmp_path: Path, caplog) -> None:
    def start(resume_step: int | None = None) -> TrackerThread:
        (thread,) = start_trackers(["tensorboard"], tmp_path, config={}, resume_step=resume_step)
        return thread

    def record(thread: TrackerThread, *steps: int) -> None:
        for step in steps:
            thread.record(step, {"train/reward_mean": step})
        taken = threading.Event()
        thread._waiting.put(lambda tracker: taken.set())
        assert taken.wait(60.0)

    thread = start()
    record(thread, 1)
    (file,) = (tmp_path / "tensorboard").iterdir()
    with files_of_at_most(file.stat().st_size):
        record(thread, 2)
    record(thread, 3)
    thread.close()
    assert tensorboard_events(tmp_path) == ({1: 1.0, 3: 3.0}, [])
    (warning,) = warnings_in(caplog)
    assert warning.startswith("tensorboard lacks data of this run: OSError: ")
    thread = start(resume_step=2)
    record(thread, 3)
    thread.close()
    assert tensorboard_events(tmp_path)[1] == [3]


@pytest.mark.parametrize("names", [["tensorboard"], []])
def test_old_files_that_cannot_be_removed_do_not_end_a_run(tmp_path: Path, names) -> None:
    """And without TensorBoard, its files are not touched."""
    stuck, old = (tmp_path / "tensorboard" / f"events.out.tfevents.{n}" for n in (1, 2))
    stuck.mkdir(parents=True)
    old.touch()
    for thread in start_trackers(names, tmp_path, config={}, resume_step=None):
        thread.close()
    assert stuck.exists()
    assert old.exists() == (not names)


@pytest.mark.parametrize(
    ("name", "left"),
    [("trackio", "trackers/trackio.id"), ("tensorboard", "tensorboard/events.out.tfevents.1")],
)
def test_a_new_run_does_not_continue_an_earlier_one_of_a_tracker(
    tmp_path: Path, caplog, name: TrackerName, left: str
) -> None:
    """Whose file cannot be removed: a folder stands for such a file."""
    (tmp_path / left).mkdir(parents=True)
    assert start_trackers([name], tmp_path, config={}, resume_step=None) == []
    (warning,) = warnings_in(caplog)
    assert left in warning


def test_a_tracker_that_is_not_installed_is_an_error_of_the_configuration(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (error,) = tracker_errors(("tensorboard", "mlflow"))
    assert error.startswith("metrics.trackers has 'mlflow', which is not installed; run pip ")
