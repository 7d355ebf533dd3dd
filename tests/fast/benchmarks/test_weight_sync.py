import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.weight_sync import kv_cache_bytes, summarize
from benchmarks.weight_sync_copies import MemoryCopy, TcpCopy
from benchmarks.weight_sync_session import Measured, Repeat, Setting
from benchmarks.weight_sync_trace import (
    read_traces,
    seconds_of,
    seconds_together,
    spans,
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


def test_the_standstill_is_between_steps_that_all_ranks_have_ended_or_begun() -> None:
    ranks = [
        spans(one_rank(swap_end_ms=110, last_step_ms=101)),
        spans(one_rank(swap_end_ms=114, last_step_ms=99)),
    ]
    assert standstill_s(ranks, 3) == pytest.approx(0.015)
    assert seconds_of(ranks, "swap weights", 3) == pytest.approx(0.011)
    assert seconds_of(ranks, "swap weights", 2) == pytest.approx(0.003)


def test_what_ranks_do_together_lasts_from_the_last_start_to_the_last_end() -> None:
    ranks = [
        spans([span("write", 10, 50, version=1), span("write", 60, 61, version=2)]),
        spans([span("write", 30, 45, version=1)]),
    ]
    assert seconds_together(ranks, "write", 1) == pytest.approx(0.020)
    with pytest.raises(LookupError, match="no rank has a span 'write' of version 3"):
        seconds_together(ranks, "write", 3)


def test_a_swap_without_decoding_on_both_sides_has_no_standstill() -> None:
    ranks = [spans(one_rank(swap_end_ms=110))]
    with pytest.raises(LookupError, match="nothing was decoded on both sides"):
        standstill_s(ranks, 2)
    with pytest.raises(LookupError, match="version 4"):
        standstill_s(ranks, 4)
    with pytest.raises(LookupError, match="no rank has a span 'publish' of version 3"):
        seconds_of(ranks, "publish", 3)


def test_the_traces_of_all_ranks_of_one_process_are_read(tmp_path: Path) -> None:
    for name in ("replica0-rank-0.17", "replica0-rank-1.18", "trainer-rank-0.19"):
        lines = [json.dumps(event) for event in one_rank(swap_end_ms=110)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    ranks = read_traces(tmp_path, "replica0")
    assert len(ranks) == 2
    assert standstill_s(ranks, 3) == pytest.approx(0.012)


def test_plain_copies_move_all_bytes_to_every_reader() -> None:
    assert MemoryCopy(1000, threads=1).run() > 0
    copy = TcpCopy(3_000_000, readers=2)
    try:
        assert [copy.run() > 0 for _ in range(2)] == [True, True]
    finally:
        copy.close()


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


def test_the_cache_has_room_for_all_requests_on_each_rank(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    one_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their size, bytes
    assert kv_cache_bytes(tmp_path, num_tokens=100, ranks=1) == 2 * 100 * one_token
    assert kv_cache_bytes(tmp_path, num_tokens=100, ranks=2) == 100 * one_token
