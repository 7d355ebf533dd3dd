"""What a run records while its disk is full: nothing but `metrics.jsonl` may end it."""

from __future__ import annotations

import json
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path

import pytest

from tests.fast.observability.test_recorder import ON_A_CPU, make_config
from tests.fast.test_line_files import files_of_at_most
from torchtitan_rl.errors import OutputError
from torchtitan_rl.observability.progress import LineProgress, ProgressState
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.observability.sinks import MetricsLog


def scalars(run_dir: Path) -> dict[int, float]:
    """Of all files, as TensorBoard's own reader gives them."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = {}
    for path in sorted((run_dir / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found[event.step] = value.tensor.float_val[0]
    return found


def sessions_begun_at(run_dir: Path) -> list[int]:
    """Steps from which on TensorBoard hides what earlier files have."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    return [
        event.step
        for path in sorted((run_dir / "tensorboard").iterdir())
        for event in EventFileLoader(str(path)).Load()
        if event.session_log.status == SessionLog.START
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_after_a_full_disk_and_metrics_jsonl_has_every_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path, tensorboard=True)
    for _ in range(30):  # one row, and 30 events of TensorBoard
        log.record(1, 1, {"train/reward_mean": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    with files_of_at_most(file.stat().st_size):
        log.record(2, 2, {"train/reward_mean": 2.0})
    log.record(3, 3, {"train/reward_mean": 3.0})
    log.close()
    assert scalars(tmp_path) == {1: 1.0, 3: 3.0}
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "TensorBoard's files" in warning


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_resume_on_a_full_disk_still_hides_later_steps_from_tensorboard(tmp_path: Path) -> None:
    with files_of_at_most(0):
        log = MetricsLog(tmp_path, tensorboard=True, resume_step=3)
    log.record(4, 4, {"train/reward_mean": 4.0})
    log.close()
    assert scalars(tmp_path) == {4: 4.0}
    assert sessions_begun_at(tmp_path) == [4]


def test_metrics_jsonl_that_cannot_be_written_is_an_error_of_the_run(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    with files_of_at_most(0), pytest.raises(OutputError, match=r"metrics\.jsonl"):
        log.record(1, 1, {"train/reward_mean": 1.0})


def test_no_phase_of_a_run_fails_and_its_merge_is_left_out_on_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RunRecorder(make_config(tmp_path, staleness=0), ON_A_CPU, resume_step=None)
    with files_of_at_most(0):
        with recorder.phase("rollout"):
            pass
        assert not any("trace" in line for line in recorder.summarize("", resume_command=""))
    said = [record.getMessage() for record in caplog.records]
    assert ["gaps" in text for text in said] == [True, False]
    assert "are not merged: [Errno 27]" in said[1]


def test_a_line_of_progress_that_a_full_disk_refuses_does_not_end_the_run() -> None:
    full = TextIOWrapper(BufferedWriter(FileIO("/dev/full", "w")))
    LineProgress(full, ProgressState(3)).say("step 1")
    LineProgress(full).say("step 1")
    with pytest.raises(OSError, match="No space left"):
        full.close()
