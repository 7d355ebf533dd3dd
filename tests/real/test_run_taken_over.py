"""A controller that is stopped for so long that another one takes over its run's folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.real.runs import ONE_REPLICA, Run, options, read_metrics
from torchtitan_rl.launch.lease import Lease
from torchtitan_rl.orchestration.journal import JOURNAL


def saved_files(run_dir: Path) -> dict[str, bytes]:
    paths = [*(run_dir / "checkpoints").rglob("*"), *run_dir.glob(f"{JOURNAL}*")]
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.soak
def test_a_controller_that_was_taken_over_ends_without_another_checkpoint(tmp_path: Path) -> None:
    more = ("--num-steps", "1000", "--checkpoint.every", "1", *ONE_REPLICA)
    run = Run(options(tmp_path, "run", *more), log=tmp_path / "log")
    run_dir = tmp_path / "run"
    run.wait_until(lambda: len(read_metrics(run_dir)) > 1, "the first step")
    controller = next(one for one in run.processes() if one.pid == run.process.pid)
    controller.suspend()
    successor = Lease(run_dir)
    successor.acquire(has_kernel_lock=False)  # as from a host that the kernel's lock does not reach
    before = saved_files(run_dir)
    controller.resume()
    try:
        assert run.wait() == 1, run.log.read_text()[-3000:]
    finally:
        successor.release()
    assert saved_files(run_dir) == before
    said = run.log.read_text()
    cause = rf"process {os.getpid()} on \S+ has taken over \S+/run, because"
    assert re.search(rf"^error: RunTakenOverError: {cause}", said, re.M), said[-3000:]
    assert "--checkpoint.resume" not in said
    assert not (run_dir / "trace.json").exists()
    assert run.left_behind() == []
