"""Metrics and rollouts on disk over kills, resumes and full files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fast.observability.test_metrics import make_group, make_rollout, make_turn
from tests.fast.test_line_files import files_of_at_most
from torchtitan_rl.errors import OutputError
from torchtitan_rl.observability import jsonl
from torchtitan_rl.observability.jsonl import JsonLines, read_rows, rotated
from torchtitan_rl.observability.rollout_log import RolloutLog
from torchtitan_rl.observability.sinks import MetricsLog, Split


def is_step(row: Any) -> bool:
    return bool(row["is_step"])


def opened(folder: Path, resume_step: int | None, max_bytes: int = 1 << 20) -> JsonLines:
    path = folder / "m.jsonl"
    return JsonLines(path, resume_step=resume_step, is_step=is_step, max_bytes=max_bytes)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(folder / "m.jsonl")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def step_row(step: int, **fields: Any) -> dict[str, Any]:
    return {"step": step, "is_step": True, **fields}


def late_row(step: int) -> dict[str, Any]:
    return {"step": step, "is_step": False}


def test_a_full_file_gets_a_number_and_a_new_one_is_begun(tmp_path: Path) -> None:
    lines = opened(tmp_path, None, max_bytes=50)
    for step in range(1, 6):
        lines.append(step_row(step))
    assert names(tmp_path) == ["m.000001.jsonl", "m.000002.jsonl", "m.jsonl"]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
    assert opened(tmp_path, None).last is None
    assert names(tmp_path) == ["m.jsonl"]


def test_a_resume_reads_the_end_of_a_file_and_not_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = opened(tmp_path, None)
    for step in range(1, 10_000):
        lines.append(step_row(step, text="x" * 50))
    monkeypatch.setattr(jsonl.json, "loads", counting := Counting(json.loads))
    assert opened(tmp_path, 9_990).last == step_row(9_990, text="x" * 50)
    assert counting.calls < 50
    assert rows(tmp_path)[-1]["step"] == 9_990


class Counting:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.calls = function, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self._function(*arguments)


def test_a_disk_that_is_full_costs_the_line_that_did_not_fit_and_no_other(tmp_path: Path) -> None:
    lines = opened(tmp_path, None)
    lines.append(step_row(1))
    with files_of_at_most(40), pytest.raises(OutputError, match=r"m\.jsonl"):
        lines.append(step_row(2))
    lines.append(step_row(3))
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]


def test_a_file_of_somebody_elses_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text("hello\n")
    with pytest.raises(OutputError, match=r"m\.jsonl"):
        opened(tmp_path, 3)


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (b'{"step":3,"is_step":true\xff}\n', "not JSON"),
        (b"\x00\x00\x00\n", "not JSON"),
        (b"[3]\n", "not a JSON object"),
        (b'{"is_step":true}\n', "not an object with a step"),
    ],
)
def test_a_damaged_row_ends_a_resume_with_its_file_and_line(
    tmp_path: Path, damaged: bytes, said: str
) -> None:
    file = tmp_path / "m.jsonl"
    good = [b'{"step":%d,"is_step":true}\n' % step for step in range(1, 6)]
    content = b"".join([*good[:2], damaged, *good[3:]])
    file.write_bytes(content)
    with pytest.raises(OutputError, match=rf"m\.jsonl, line 3: {said}"):
        opened(tmp_path, 2)
    assert file.read_bytes() == content
    assert opened(tmp_path, 5).last == step_row(5)  # no need to read so far
    with pytest.raises(OutputError, match=rf"m\.jsonl, line 3: {said}"):
        opened(tmp_path, 5).lines_of(2, lambda row: True)


class Killed(BaseException):
    """The process ends here."""


def kill_at(patch: pytest.MonkeyPatch, moment: int, *, torn: float) -> None:
    """At that change of a file: nothing of it is done but, of a write, a share."""
    changes = 0

    def is_due() -> bool:
        nonlocal changes
        changes += 1
        return changes >= moment

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            if is_due():
                raise Killed
            return function(*arguments, **options)

        return change

    class TornFile(FileIO):
        def write(self, data: Any, /) -> int:
            if is_due():
                super().write(bytes(data)[: int(len(data) * torn)])
                raise Killed
            return super().write(data)

        def truncate(self, size: int | None = None, /) -> int:
            if changes >= moment or is_due():
                raise Killed
            return super().truncate(size)

    def write_bytes(path: Path, data: bytes) -> int:
        with TornFile(path, "w") as file:
            return file.write(data)

    patch.setattr("torchtitan_rl.files.FileIO", TornFile)
    patch.setattr(jsonl, "FileIO", TornFile)
    patch.setattr(Path, "write_bytes", write_bytes)
    for name in ("unlink", "rename", "replace"):
        patch.setattr(Path, name, guarded(getattr(Path, name)))


EVENTS = st.lists(st.sampled_from(["step", "step", "step", "late", "merge"]), max_size=14)


@settings(max_examples=300, deadline=None)
@given(
    events=EVENTS,
    more=EVENTS,
    back=st.integers(0, 4),
    moment=st.integers(1, 30),
    torn=st.sampled_from([0.0, 0.4, 0.9]),
    max_bytes=st.sampled_from([50, 110, 10_000]),
)
@example(events=["step", "merge"], more=[], back=0, moment=3, torn=0.4, max_bytes=10_000)
@example(events=["step"] * 5, more=["step"], back=4, moment=4, torn=0.0, max_bytes=50)
def test_whatever_moment_a_kill_comes_at_the_rows_up_to_the_checkpoint_are_all_there_once(
    events: list[str], more: list[str], back: int, moment: int, torn: float, max_bytes: int
) -> None:
    """Rows of one life, a resume ``back`` steps before its end that is killed, and one that is not.

    A checkpoint is of a step whose row was recorded; evaluations of a step may come later."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        live = written(opened(folder, None, max_bytes), events)
        step = max(0, max((row["step"] for row in live), default=0) - back)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, moment, torn=torn)
            killed = Rows()
            try:
                lines = opened(folder, step, max_bytes)
                killed.started = True
                written(lines, more, killed, step)
            except Killed:
                pass
        kept = [row for row in live if row["step"] <= step]
        found = rows(folder)
        if killed.started:
            assert found in [kept + killed, kept + killed.before_last, kept + killed.with_next]
        else:
            assert found in [live, kept]
        opened(folder, step, max_bytes).close()
        assert sorted(rows(folder), key=str) == sorted(
            (row for row in found if row["step"] <= step), key=str
        )
        assert all(path.suffix == ".jsonl" for path in folder.iterdir())


class Rows(list[dict[str, Any]]):
    """What was recorded, and what is being recorded."""

    started = False

    def __init__(self) -> None:
        super().__init__()
        self.before_last: list[dict[str, Any]] = []
        self.with_next: list[dict[str, Any]] = []


def written(
    lines: JsonLines, events: list[str], into: Rows | None = None, step: int = 0
) -> list[dict[str, Any]]:
    done = Rows() if into is None else into
    for event in events:
        done.before_last = list(done)
        if event == "merge" and done and lines.last == done[-1]:
            merged = done[-1] | {"merged": True}
            done.with_next = [*done[:-1], merged]
            lines.replace_last(merged)
            done[-1] = merged
            continue
        step += event == "step"
        row = step_row(step) if event == "step" else late_row(max(0, step - 1))
        done.with_next = [*done, row]
        lines.append(row)
        done.append(row)
    done.with_next = done.before_last = list(done)
    lines.close()
    return done


def test_a_merged_row_that_a_kill_cut_short_keeps_its_training_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    log.record(1, 1, {"train/reward_mean": 0.5})
    for moment in range(1, 6):
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, moment, torn=0.5)
            with suppress(Killed):
                log = MetricsLog(tmp_path, tensorboard=False, resume_step=1)
                log.record(1, 1, {"evaluation/reward_mean": 0.25})
        (row,) = (row for _, row in read_rows(tmp_path / "metrics.jsonl"))
        assert row["train/reward_mean"] == 0.5


def test_a_evaluation_that_a_resumed_run_does_again_is_recorded_once(tmp_path: Path) -> None:
    """As at a staleness above 0: the checkpoint of step 1 was taken while step 1 was validated."""
    groups = [make_group(make_rollout(1.0, make_turn((1,), (2,))))]

    def record(log: MetricsLog, rollouts: RolloutLog, step: int, split: Split) -> None:
        said = rollouts.record(step, step, groups, split)
        log.record(step, step, {f"{split.value}/reward_mean": 0.5} | said)

    for resume_step in (None, 1):
        log = MetricsLog(tmp_path, tensorboard=False, resume_step=resume_step)
        rollouts = RolloutLog(
            tmp_path / "rollouts.jsonl", per_step=1, seed=0, resume_step=resume_step
        )
        if resume_step is None:
            record(log, rollouts, 1, Split.TRAIN)
        record(log, rollouts, 2, Split.TRAIN)
        record(log, rollouts, 1, Split.EVALUATION)
        record(log, rollouts, 2, Split.EVALUATION)
    found = [row for _, row in read_rows(tmp_path / "rollouts.jsonl")]
    assert [(row["split"], row["step"]) for row in found] == [
        ("train", 1),
        ("evaluation", 1),
        ("train", 2),
        ("evaluation", 2),
    ]
    metrics = [row for _, row in read_rows(tmp_path / "metrics.jsonl")]
    validated = [row["step"] for row in metrics if "evaluation/reward_mean" in row]
    assert sorted(validated) == [1, 2]


def test_after_a_row_that_could_not_be_merged_every_use_says_that_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = opened(tmp_path, None)
    lines.append(step_row(1))

    def refuse(path: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(jsonl, "open_for_append", refuse)
    with pytest.raises(OutputError):
        lines.replace_last(step_row(1))
    for use in (lines.append, lines.replace_last, lambda row: lines.lines_of(1, bool)):
        with pytest.raises(OutputError, match="the file is closed"):
            use(step_row(1))


def test_the_files_before_are_numbered_in_the_order_they_were_written_in(tmp_path: Path) -> None:
    for name in ("m.000010.jsonl", "m.1000000.jsonl", "m.000002.jsonl", "m.x.jsonl", "m.jsonl"):
        (tmp_path / name).touch()
    found = [os.path.basename(path) for path in rotated(tmp_path / "m.jsonl")]
    assert found == ["m.000002.jsonl", "m.000010.jsonl", "m.1000000.jsonl"]
