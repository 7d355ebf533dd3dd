import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fast.test_files import files_of_at_most
from torchtitan_rl.observability.trace import (
    CLOCKS,
    KEPT_FILES,
    ClockOffset,
    Tracer,
    merge_traces,
    read_clocks,
    write_clocks,
)


def merged_events(trace_dir: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(merge_traces(trace_dir).read_text())["traceEvents"]
    return events


def spans(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in events if event["ph"] == "X"}


def test_spans_of_all_processes_lie_on_one_clock_under_their_names(tmp_path: Path) -> None:
    trainer, replica = Tracer(tmp_path / "traces", "trainer"), Tracer(tmp_path / "traces", "r/0")
    before_us = time.time_ns() / 1e3
    with trainer.span("train", step=3):
        pass
    with replica.span("decode"):
        pass
    after_us = time.time_ns() / 1e3
    events = merged_events(tmp_path / "traces")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["r/0", "trainer"]
    train, decode = spans(events)["train"], spans(events)["decode"]
    assert names[train["pid"]] == "trainer"
    assert names[decode["pid"]] == "r/0"
    assert train["args"] == {"step": 3}
    slack_us = 1e3  # the clocks are read one after the other
    assert before_us - slack_us <= train["ts"] <= decode["ts"] <= after_us + slack_us


def test_a_killed_process_costs_its_unfinished_line_only(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "traces", "trainer")
    with tracer.span("train"):
        pass
    (file,) = (tmp_path / "traces").iterdir()
    file.write_text(file.read_text() + '{"name":"pub')
    assert list(spans(merged_events(tmp_path / "traces"))) == ["train"]


@pytest.mark.parametrize(
    "line", [200_000 * "[", '{"ts":"1"}', '{"ts":null}', '{"name":"process_labels","args":[]}']
)
def test_a_damaged_line_costs_its_event_only(tmp_path: Path, line: str) -> None:
    tracer = Tracer(tmp_path / "traces", "trainer")
    with tracer.span("train"):
        pass
    (file,) = (tmp_path / "traces").iterdir()
    file.write_text(f"{line}\n{file.read_text()}")
    events = merged_events(tmp_path / "traces")
    assert [event["name"] for event in events] == ["process_name", "thread_name", "train"]


@pytest.mark.parametrize(
    "content", [200_000 * "[", '{"h":{"ahead_ns":null,"error_ns":1}}', "[]", b"\xff"]
)
def test_damaged_offsets_of_clocks_are_none(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / CLOCKS).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read_clocks(tmp_path) == {}


def test_a_long_run_keeps_the_newest_spans_of_a_process_and_names_of_its_tracks(
    tmp_path: Path,
) -> None:
    tracer = Tracer(tmp_path / "traces", "trainer", max_bytes=400)
    for index in range(100):
        with tracer.span(f"step {index}", track="steps"):
            pass
    tracer.close()
    files = list((tmp_path / "traces").iterdir())
    assert len(files) == KEPT_FILES
    assert all(path.stat().st_size < 800 for path in files)
    events = merged_events(tmp_path / "traces")
    assert "step 99" in spans(events)
    assert "step 0" not in spans(events)
    named = {event["pid"] for event in events if event["name"] == "thread_name"}
    assert len(named) == KEPT_FILES


def test_a_full_disk_costs_events_and_no_span_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = Tracer(tmp_path / "traces", "trainer")
    with tracer.span("before"):
        pass
    with files_of_at_most(0):
        with tracer.span("full"):
            pass
        with tracer.span("full too", track="another"):
            pass
    with tracer.span("after", track="another"):
        pass
    tracer.close()
    events = merged_events(tmp_path / "traces")
    assert list(spans(events)) == ["before", "after"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks[spans(events)["after"]["tid"]] == "another"
    assert [record.getMessage() for record in caplog.records] == [
        "the trace of trainer has gaps: [Errno 27] File too large"
    ]


def test_processes_of_a_host_whose_clock_is_ahead_lie_where_they_belong(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    here, there = Tracer(traces, "controller"), Tracer(traces, "replica0", host="host1")
    now_ns = time.perf_counter_ns()
    here.complete("ask", now_ns, now_ns + 1000)
    there.complete("answer", now_ns, now_ns + 1000)
    write_clocks(traces, {"host1": ClockOffset(ahead_ns=5_000_000_000, error_ns=1000)})
    events = spans(merged_events(traces))
    assert events["answer"]["ts"] == pytest.approx(events["ask"]["ts"] - 5e6, abs=1e4)
    assert read_clocks(traces)["host1"].error_ns == 1000
