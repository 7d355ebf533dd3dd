"""A whole run with adapters: real replicas that are killed and pull, the trainer, its files."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.real.runs import ONE_REPLICA, Run, options, read_metrics, require_audit
from torchtitan_rl.config.lora import ADAPTER_FOLDER, ADAPTER_WEIGHTS

LORA = ("--policy.lora.rank", "4", "--trainer.optimizer.learning-rate", "0.004")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run_dir) if "trainer/weights_digest" in row]


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_trains_adapters_and_a_replica_that_starts_again_gets_the_newest(
    tmp_path: Path, ranks: int
) -> None:
    """The logprobs of vLLM and of the trainer are compared in each step, so a replica without its
    adapter, or with an older one, would be seen."""
    replica = (*ONE_REPLICA, "--generator.tensor-parallel", str(ranks))
    words = options(tmp_path, "lora", *LORA, *replica, "--num-steps", "4")
    run = Run(words, log=tmp_path / "log")
    run.wait_until(lambda: "step 2/4" in run.log.read_text(), "the second step")
    run.process_of(f"replica0-rank{ranks - 1}").send_signal(signal.SIGKILL)
    run.require_success()
    run_dir = tmp_path / "lora"
    require_audit(run_dir)
    rows = steps_of(run_dir)
    assert len(rows) == 4
    assert all(row["trainer/logprob_diff_max"] < 1e-4 for row in rows)
    assert len({row["trainer/weights_digest"] for row in rows}) == 4
    tensors = load_file(run_dir / ADAPTER_FOLDER / ADAPTER_WEIGHTS)
    assert all(tensor.any() for tensor in tensors.values())
    assert not list(Path("/dev/shm").glob("torchtitan-rl-adapter-*"))
