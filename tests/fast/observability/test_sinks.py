"""Metrics and rollouts on disk over kills, resumes, full files and full disks."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fast.test_files import files_of_at_most
from torchtitan_rl.errors import OutputError
from torchtitan_rl.observability.sinks import MetricsLog, RowKind, RowLog, read_rows

Row = dict[str, Any]


def opened(folder: Path, resume_step: int | None = None, max_bytes: int = 1 << 20) -> RowLog:
    path = folder / "m.jsonl"
    log = RowLog(path, is_new=resume_step is None, max_bytes=max_bytes)
    if resume_step is not None:
        log.append({"kind": "resumed", "step": resume_step})
    return log


def rows(folder: Path, name: str = "m.jsonl") -> list[Row]:
    return [line.row for line in read_rows(folder / name)]


def steps(folder: Path, name: str = "m.jsonl") -> list[int]:
    return [row["step"] for row in rows(folder, name)]


def test_a_full_file_gets_the_next_number_and_all_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "m.000009.jsonl").write_text('{"step":0}\n')
    (tmp_path / "m.x.jsonl").write_text("of another program\n")
    log = RowLog(tmp_path / "m.jsonl", is_new=False, max_bytes=20)
    for step in range(1, 6):
        log.append({"step": step})
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert {path.name for path in tmp_path.glob("m.0*")} == {
        "m.000009.jsonl",
        "m.000010.jsonl",
        "m.000011.jsonl",
    }
    opened(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"m.jsonl", "m.x.jsonl"}


def test_rows_of_steps_that_are_taken_again_do_not_count_and_lives_are_told_apart(
    tmp_path: Path,
) -> None:
    for resume_step, written in ((None, [1, 2, 3, 1, 4]), (2, [3]), (3, [4, 2]), (1, [2])):
        log = opened(tmp_path, resume_step)
        for step in written:
            log.append({"step": step})
        log.close()
    assert steps(tmp_path) == [1, 1, 2]
    assert [line.life for line in read_rows(tmp_path / "m.jsonl")] == [0, 0, 3]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"kind":"resumed"}'], "line 1: step = None is not an integer"),
        (['{"step":null}', '{"kind":"resumed","step":1}'], "line 1: step = None is not an"),
        (['{"step":1}', '{"kind":"resumed","step":"1"}'], "line 2: step = '1' is not an"),
        ([200_000 * "["], "line 1: not JSON"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "m.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ValueError, match=message):
        rows(tmp_path)


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

    patch.setattr("torchtitan_rl.files.FileIO", TornFile)
    for name in ("unlink", "rename"):
        patch.setattr(Path, name, guarded(getattr(Path, name)))


@settings(max_examples=60, deadline=None)
@given(
    lives=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=4),
    moment=st.integers(1, 12),
    torn=st.sampled_from([0.0, 0.4, 0.9]),
    max_bytes=st.sampled_from([20, 50, 10_000]),
)
def test_whatever_moment_a_kill_comes_at_the_rows_up_to_the_checkpoint_are_all_there_once(
    lives: list[tuple[int, int]], moment: int, torn: float, max_bytes: int
) -> None:
    """Each life goes back some steps and takes some; the last one is killed at a moment."""
    with tempfile.TemporaryDirectory() as name:
        folder, expected = Path(name), list[int]()
        for number, (back, taken) in enumerate(lives):
            resumed = max(0, len(expected) - back)
            before, in_time = list(expected), expected[:resumed]
            with pytest.MonkeyPatch.context() as patch:
                if number == len(lives) - 1:
                    kill_at(patch, moment, torn=torn)
                written = in_time
                has_begun = False
                with suppress(Killed):
                    log = opened(folder, resumed if number else None, max_bytes)
                    has_begun = True
                    for step in range(resumed + 1, resumed + taken + 1):
                        log.append({"step": step})
                        written = [*written, step]
            expected = written
        found = steps(folder)
        assert found in [expected, [*expected, len(expected) + 1]] or (
            not has_begun and found == before
        )
        opened(folder, len(found)).close()
        assert steps(folder) == found


def metrics_log(run_dir: Path, resume_step: int | None = None) -> MetricsLog:
    return MetricsLog(run_dir, resume_step=resume_step)


def test_each_row_is_in_the_file_at_once_and_says_what_it_describes(tmp_path: Path) -> None:
    log = metrics_log(tmp_path)
    log.record(RowKind.STEP, 1, 1, {"train/reward_mean": 0.2, "trainer/entropy": math.nan})
    log.record(RowKind.EVALUATION, 1, 1, {"evaluation/reward_mean": 0.3})
    with pytest.raises(ValueError, match="unknown metrics"):
        log.record(RowKind.STEP, 2, 2, {"train/reward_mean": 1, "lag": 2})
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    found = [{name: row[name] for name in row if name != "wall_time_s"} for row in lines]
    assert found == [
        {
            "kind": "step",
            "step": 1,
            "version": 1,
            "train/reward_mean": 0.2,
            "trainer/entropy": None,
        },
        {"kind": "evaluation", "step": 1, "version": 1, "evaluation/reward_mean": 0.3},
    ]


def test_the_reader_of_docs_metrics_md_gives_the_rows_that_count(tmp_path: Path) -> None:
    for resume_step, taken in ((None, [1, 2, 3]), (2, [3, 4])):
        log = metrics_log(tmp_path, resume_step)
        for step in taken:
            log.record(RowKind.STEP, step, step, {"train/reward_mean": step + (resume_step or 0)})
        log.close()
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names: Row = {}
    exec(code.replace("outputs/my_run", str(tmp_path)), names)
    assert [row["step"] for row in names["steps"]] == [1, 2, 3, 4]
    assert names["steps"] == rows(tmp_path, "metrics.jsonl")


def test_a_row_that_cannot_be_written_is_an_error_and_costs_no_other_row(tmp_path: Path) -> None:
    log = metrics_log(tmp_path)
    with files_of_at_most(40), pytest.raises(OutputError, match=r"metrics\.jsonl"):
        log.record(RowKind.STEP, 1, 1, {"train/reward_mean": 1.0})
    log.record(RowKind.STEP, 2, 2, {"train/reward_mean": 1.0})
    assert steps(tmp_path, "metrics.jsonl") == [2]
