"""Metrics and rollouts in the trackers' own stores, read back by their own readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_rl.observability.trackers import FOLDER, start_trackers

REWARD = "train/reward_mean"
ROW = {
    "split": "train",
    "chosen": "best",
    "reward": 1.0,
    "status": "completed",
    "problem_id": "p",
    "rollout_id": "g/r0",
    "turns": [{"text": "first"}, {"text": None}],
}


def record(run_dir: Path, name: Any, values: dict[int, float], resume_step: int | None) -> None:
    (thread,) = start_trackers([name], run_dir, config={"seed": 0}, resume_step=resume_step)
    for step, value in values.items():
        thread.record(step, {REWARD: value})
        thread.record_rollouts(step, [ROW])
    thread.close(timeout_s=60.0)


def tensorboard_values(run_dir: Path) -> dict[int, float]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(REWARD)}


def wandb_values(run_dir: Path) -> dict[int, float]:
    """The history in the files of offline mode, of which each life of a run has one."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, ids = {}, set()
    for path in sorted(run_dir.rglob("*.wandb")):
        for data in wandb_records(path.read_bytes()):
            one = Record.FromString(data)
            ids |= {one.run.run_id} if one.HasField("run") else set()
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in one.history.item
            }
            if REWARD in items:
                found[items["step"]] = items[REWARD]
    assert len(ids) == 1
    assert any(run_dir.rglob("*.table.json"))
    return found


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, whose blocks have 32 KiB."""
    place, parts = 7, b""  # after W&B's own header
    while place + 7 <= len(content):
        left = (1 << 15) - place % (1 << 15)
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def mlflow_values(run_dir: Path) -> dict[int, float]:
    from mlflow import MlflowClient

    run_id = (run_dir / FOLDER / "mlflow.id").read_text().strip()
    client = MlflowClient(tracking_uri=(run_dir / FOLDER / "mlflow").as_uri())
    assert client.get_run(run_id).data.params == {"seed": "0"}
    assert client.list_artifacts(run_id, "rollouts")
    history = client.get_metric_history(run_id, REWARD)
    return {one.step: one.value for one in history}


def trackio_values(run_dir: Path) -> dict[int, float]:
    from trackio.sqlite_storage import SQLiteStorage

    run_id = (run_dir / FOLDER / "trackio.id").read_text().strip()
    logs = SQLiteStorage.get_logs("torchtitan-rl", run_id)
    return {one["step"]: one[REWARD] for one in logs if REWARD in one}


@pytest.mark.parametrize(
    ("name", "values_of"),
    [
        ("tensorboard", tensorboard_values),
        ("wandb", wandb_values),
        ("mlflow", mlflow_values),
        ("trackio", trackio_values),
    ],
)
def test_a_tracker_shows_a_resumed_run_as_one_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    values_of: Callable[[Path], dict[int, float]],
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    record(tmp_path, name, {1: 0.25, 2: 0.5, 3: 0.75}, None)
    record(tmp_path, name, {3: 1.0, 4: 2.0}, 2)
    assert values_of(tmp_path) == {1: 0.25, 2: 0.5, 3: 1.0, 4: 2.0}
