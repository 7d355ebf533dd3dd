"""The main job started by torchrun on two and four nodes, which are addresses of this machine."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.real.hosts.nodes import Nodes, wait_until
from tests.real.runs import options, read_metrics, require_audit

STEPS = ("--num-steps", "2")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made = []

    def start(*more: str, num_nodes: int = 2, torchrun: tuple[str, ...] = ()) -> Nodes:
        words = ["torchtitan_rl.launch", *options(tmp_path, "run", *more)]
        run = Nodes(tmp_path, words, num_nodes=num_nodes)
        made.append(run)
        for node in range(num_nodes):
            own = "--launch.allow-plain-tcp", "--launch.interface", f"127.0.0.{node + 2}"
            run.start_torchrun(torchrun, *own)
        return run

    yield start
    for run in made:
        run.kill_all()


@pytest.mark.soak
def test_a_run_on_two_nodes_trains_and_leaves_nothing_behind(nodes, tmp_path) -> None:
    run = nodes(*STEPS)
    assert run.wait() == [0, 0], run.log(0) + run.log(1)
    rows = read_metrics(tmp_path / "run")
    assert [row["policy/version"] for row in rows] == [0, 1, 2]
    require_audit(tmp_path / "run")
    printed = run.log(0) + run.log(1)
    assert "host0: 2 replicas; host1: trainer" in printed
    assert "worker: listening on tcp://127.0.0.2" in printed
    assert "worker: listening on tcp://127.0.0.3" in printed


@pytest.mark.soak
def test_a_run_on_four_nodes_trains(nodes, tmp_path) -> None:
    run = nodes(*STEPS, "--generator.replicas", "3", num_nodes=4)
    assert run.wait() == [0] * 4, run.log(0)
    require_audit(tmp_path / "run")


@pytest.mark.soak
def test_a_signal_writes_a_checkpoint_and_the_same_command_resumes(nodes, tmp_path) -> None:
    run = nodes("--num-steps", "50", torchrun=("--shutdown-timeout=120",))
    wait_until(lambda: len(read_metrics(tmp_path / "run")) > 1, "a step")
    run.launchers[1].send_signal(signal.SIGTERM)
    assert all(code != 0 for code in run.wait())
    done = read_metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:06d}").is_dir()
    again = nodes("--num-steps", str(done + 1), "--checkpoint.resume")
    assert again.wait() == [0, 0], again.log(0)
    assert f"resumed after step {done}" in again.log(0) + again.log(1)
    require_audit(tmp_path / "run")


@pytest.mark.soak
def test_torchrun_restarts_a_run_that_failed_and_it_resumes(nodes, tmp_path) -> None:
    options = ("--num-steps", "4", "--checkpoint.every", "1", "--trainer.max-restarts", "0")
    run = nodes(*options, torchrun=("--max-restarts=1",))
    wait_until(lambda: len(read_metrics(tmp_path / "run")) > 1, "a step")
    wait_until(lambda: any((tmp_path / "run" / "checkpoints").glob("step-??????")), "a checkpoint")
    for process in run.processes():
        if is_trainer(process.pid):
            process.kill()
    assert run.wait() == [0, 0], run.log(0) + run.log(1)
    assert "resumed after step" in run.log(0) + run.log(1)
    require_audit(tmp_path / "run")


def is_trainer(pid: int) -> bool:
    try:
        return "trainer-rank0" in str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return False
