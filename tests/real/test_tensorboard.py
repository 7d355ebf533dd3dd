"""Metrics in TensorBoard's own files, read back by TensorBoard's own reader."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_rl.observability.sinks import MetricsLog, RowKind


def read_scalar(run_dir: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_shows_each_step_once_after_a_resume_and_nothing_of_an_earlier_run(
    tmp_path: Path,
) -> None:
    def record(values: dict[int, float], resume_step: int | None) -> None:
        log = MetricsLog(tmp_path, tensorboard=True, resume_step=resume_step)
        for step, value in values.items():
            log.record(RowKind.STEP, step, step, {"train/reward_mean": value})
        log.close()

    record({1: 9.0, 2: 9.0}, None)
    record({1: 0.25, 2: 0.5, 3: 0.75}, None)
    record({3: 1.0, 4: 2.0}, 2)
    shown = [(1, 0.25), (2, 0.5), (3, 1.0), (4, 2.0)]
    assert read_scalar(tmp_path, "train/reward_mean") == shown
