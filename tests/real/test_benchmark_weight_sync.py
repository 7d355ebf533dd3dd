"""The benchmark of weight syncs on its smallest setting: two FSDP ranks, one replica."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.real.runs import ROOT


def test_both_transports_bring_the_same_weights_to_the_replica_while_it_decodes(
    tmp_path: Path,
) -> None:
    output = tmp_path / "weight_sync.json"
    small = ["--policies", "tiny", "--ranks", "2x1", "--repeats", "1", "--running", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.weight_sync", *small, "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(output.read_text())
    assert report["machine"]["cores"] > 0
    shared, remote = report["results"]
    assert [shared["setting"]["transport"], remote["setting"]["transport"]] == [
        "shared_memory",
        "rdma",
    ]
    for result in (shared, remote):
        assert result["last_version"] == 4  # two steps a repeat, and an unmeasured repeat first
        assert result["running_at_pulls"] == [2, 2]
        assert result["num_bytes"] > 4_000_000
        assert len(result["repeats"]) == 1
        zero = [name for name, seconds in result["repeats"][0].items() if seconds <= 0]
        assert zero == (["gather_s"] if result is shared else [])
        assert result["repeats"][0]["standstill_s"] >= result["repeats"][0]["stall_s"]
        assert set(result["medians"]) == set(result["repeats"][0])
        assert len(result["ratios"]) == 3
    assert shared["num_bytes"] == remote["num_bytes"]
    assert len(shared["probe_token_ids"]) == 8
    assert shared["probe_token_ids"] == remote["probe_token_ids"]
    assert output.with_suffix(".png").stat().st_size > 0
