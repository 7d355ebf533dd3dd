"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and trackio.

A tracker gets the same metrics as ``metrics.jsonl`` and, if it has tables or files, the rollouts of
``rollouts.jsonl``. Each tracker is used by one thread of its own (`TrackerThread`).

Invariant: a tracker that fails or hangs neither delays nor ends the run. The log says so once, and
the tracker lacks data that ``metrics.jsonl`` has.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torchtitan_rl.config.run import TrackerName
from torchtitan_rl.files import replace_file

logger = logging.getLogger(__name__)

FOLDER = "trackers"
"""The folder of the trackers' own files, in the folder of a run."""

_PROJECT = "torchtitan-rl"
_MAX_WAITING = 1000  # rows that wait for a tracker; then rows are left out
_CLOSE_S = 20.0  # a tracker may use this time at the end of the run, for example to upload
_COLUMNS = ("split", "chosen", "reward", "status", "problem_id", "rollout_id", "text")


class Tracker(Protocol):
    """All methods are called in one thread, and may raise any exception."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def record_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record rows of ``rollouts.jsonl``, if it has tables or files."""
        return

    def close(self) -> None: ...


def start_trackers(
    names: Sequence[TrackerName],
    run_dir: Path,
    *,
    config: Mapping[str, Any],
    resume_step: int | None,
) -> list[TrackerThread]:
    """Start a thread for each tracker. ``config`` is what a tracker shows as the configuration."""
    folder = run_dir / FOLDER
    events = run_dir / "tensorboard"
    refused = set()  # trackers that would continue an earlier run, of which a file is left
    if resume_step is None:
        old_events = events.glob("events.out.tfevents.*") if "tensorboard" in names else ()
        for old in (*folder.glob("*.id"), *old_events):
            try:
                old.unlink()
            except OSError as error:  # no tracker ends a run
                refused.add(old.stem if old.parent == folder else "tensorboard")
                logger.warning("a tracker's file of an earlier run cannot be removed: %s", error)
    purge_steps = [] if resume_step is None else [resume_step + 1]
    makers: dict[TrackerName, Callable[[], Tracker]] = {
        "tensorboard": lambda: _TensorBoard(events, purge_steps),
        "wandb": lambda: _WeightsAndBiases(run_dir.name, folder, config),
        "mlflow": lambda: _MLflow(run_dir.name, folder, config),
        "trackio": lambda: _Trackio(run_dir.name, folder, config),
    }
    return [TrackerThread(name, makers[name]) for name in names if name not in refused]


class TrackerThread:
    """Passes data to a tracker in a thread. After an error the tracker is closed, and ``make`` is
    called again for the next data."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._make = make
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MAX_WAITING)
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put(lambda tracker: tracker.record(step, metrics))

    def record_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._put(lambda tracker: tracker.record_rollouts(step, rows))

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Let the tracker take all data that wait, and close it. Waits at most ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"it did not end within {timeout_s:g} s")

    def _put(self, act: Callable[[Tracker], None]) -> None:
        try:
            self._waiting.put_nowait(act)
        except queue.Full:
            self._warn(f"{_MAX_WAITING} rows wait for it, and no more are kept")

    def _run(self) -> None:
        tracker: Tracker | None = None
        while True:
            act = self._waiting.get()
            try:
                if act is not None:
                    tracker = tracker or self._make()
                    act(tracker)
                elif tracker is not None:
                    tracker.close()
            except BaseException as error:  # a tracker may even raise SystemExit
                self._warn(f"{type(error).__name__}: {error}")
                failed, tracker = tracker, None
                if failed is not None and act is not None:
                    with contextlib.suppress(BaseException):
                        failed.close()
            if act is None:
                return

    def _warn(self, cause: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s lacks data of this run: %s", self._name, " ".join(cause.split()))


class _TensorBoard(Tracker):
    """A writer of one file. After an OSError a `SummaryWriter` raises the same error at every call;
    its successor writes a new file. ``purge_steps``: the step from which TensorBoard itself hides
    rows in earlier files; removed once written: again, it would hide rows of this process."""

    def __init__(self, folder: Path, purge_steps: list[int]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=next(iter(purge_steps), None))
        if purge_steps:
            self._writer.flush()
            purge_steps.clear()

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=name,
            id=_run_id(folder / "wandb.id", lambda: uuid.uuid4().hex),
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # A resumed run takes steps again, which its own counter of steps does not allow.
        self._run.define_metric("*", step_metric="step")

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def record_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self._wandb.Table(columns=list(_COLUMNS), data=_table(rows))
        self._run.log({"step": step, f"rollouts/{rows[0]['split']}": table})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        # Its file store must be allowed: https://mlflow.org/docs/latest/self-hosting/migrate-from-file-store
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").absolute().as_uri()
        self._client = client = MlflowClient(tracking_uri=uri)

        def make() -> str:
            project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            found = client.get_experiment_by_name(project)
            experiment = found.experiment_id if found else client.create_experiment(project)
            run_id: str = client.create_run(experiment, run_name=name).info.run_id
            params = [Param(name, str(value)[:500]) for name, value in config.items()]
            for start in range(0, len(params), 100):  # the most that one call takes
                client.log_batch(run_id, params=params[start : start + 100])
            return run_id

        self._run_id = _run_id(folder / "mlflow.id", make)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = [self._metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def record_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = "\n".join(json.dumps(dict(row)) for row in rows)
        name = f"rollouts/{rows[0]['split']}-{step:06d}.jsonl"
        self._client.log_text(self._run_id, lines, name)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class _Trackio(Tracker):  # its tables need pandas
    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=_run_id(folder / "trackio.id", lambda: f"{name}-{uuid.uuid4()}"),
            resume="allow",
            config=dict(config),
            embed=False,
        )

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(file: Path, make: Callable[[], str]) -> str:
    """Return the tracker's id of this run from ``file``, so that a resumed run continues in the
    same place; or make one, and write the file."""
    if file.exists():
        return file.read_text().strip()
    run_id = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, f"{run_id}\n".encode())
    return run_id


def _table(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [[row[name] for name in _COLUMNS[:-1]] + [_text(row)] for row in rows]


def _text(row: Mapping[str, Any]) -> str:
    return "\n\n".join(turn["text"] or "" for turn in row["turns"])
