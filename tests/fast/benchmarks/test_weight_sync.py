import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.weight_sync import summarize
from benchmarks.weight_sync_session import Measured, Repeat, Setting
from benchmarks.weight_sync_trace import (
    read_traces,
    standstill_s,
)
from torchtitan_rl.weights.config import Transport


def span(name: str, start_ms: float, end_ms: float, **args: Any) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": start_ms * 1e3,
        "dur": (end_ms - start_ms) * 1e3,
        "tid": 1,
        "args": args,
    }


def one_rank(*, swap_end_ms: float, last_step_ms: float = 100) -> list[dict[str, Any]]:
    """Decodes until then, swaps version 3 from 103 ms on, and decodes 2 ms after that again."""
    return [
        {"name": "process_name", "ph": "M", "args": {"name": "replica0 rank 0"}},
        span("swap weights", 5, 8, version=2),
        span("decode", 10, 90),
        span("decode", 90, last_step_ms),
        span("swap weights", 103, swap_end_ms, version=3),
        span("reset prefix cache", swap_end_ms, swap_end_ms + 1),
        span("decode", swap_end_ms + 2, swap_end_ms + 50),
        span("decode", swap_end_ms + 60, swap_end_ms + 70),
    ]


def test_the_traces_of_all_ranks_of_one_process_are_read(tmp_path: Path) -> None:
    for name in ("replica0-rank-0.17", "replica0-rank-1.18", "trainer-rank-0.19"):
        lines = [json.dumps(event) for event in one_rank(swap_end_ms=110)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    ranks = read_traces(tmp_path, "replica0")
    assert len(ranks) == 2
    assert standstill_s(ranks, 3) == pytest.approx(0.012)


def test_ratios_are_those_of_medians() -> None:
    fields = [field.name for field in dataclasses.fields(Repeat)]
    base = dict.fromkeys(fields, 1.0) | {"write_s": 0.25, "fetch_s": 0.25, "memory_copy_s": 0.4}
    repeats = tuple(Repeat(**(base | {"standstill_s": stall})) for stall in (9.0, 1.2, 1.1))
    measured = Measured(
        setting=Setting(policy="tiny", transport=Transport.SHARED_MEMORY),
        num_bytes=10**9,
        last_version=6,
        running_at_pulls=(16, 16, 16),
        probe_token_ids=(1, 2),
        repeats=repeats,
    )
    summary = summarize("tiny", measured)
    assert summary["ratios"]["stall / load alone"] == pytest.approx(1.2)
    assert summary["ratios"]["transfer rate / memory copy"] == pytest.approx(0.8)
    assert summary["ratios"]["fetch rate / TCP copy"] == pytest.approx(4.0)
    assert summary["gigabytes_per_second"]["transfer"] == pytest.approx(2.0)
    assert json.loads(json.dumps(summary))["setting"]["transport"] == "shared_memory"
