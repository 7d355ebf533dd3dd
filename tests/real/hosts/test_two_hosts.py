"""Runs whose processes are on two hosts: two workers on loopback addresses of this machine, between
which shared memory is not used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGTERM

import pytest

from tests.real.runs import ONE_REPLICA, Run, options, read_rollouts, require_audit, train, weights
from torchtitan_rl.launch.interfaces import free_port

STEPS = ("--num-steps", "2", "--checkpoint.export-hf", "--metrics.rollouts-per-step", "1000")

# A test machine may be too busy to answer within the 15 s after which a host counts as lost.
PATIENT = {
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "120s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "120s",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "300s",
}


@contextmanager
def workers(root: Path) -> Iterator[list[str]]:
    """The addresses of workers that listen. At the end each stops at a signal, with all it had."""
    with ExitStack() as stack:
        running = []
        for index in range(2):
            host = f"127.0.0.{2 + index}"
            address = f"tcp://{host}:{free_port(host)}"
            log = root / f"worker{index}.log"
            worker = Run(["--address", address, "--allow-plain-tcp"], log=log, command="worker")
            stack.callback(worker.kill_all)
            running.append((address, worker))
        for address, worker in running:
            worker.wait_until(partial(is_listening, worker, address), f"start of {address}")
        yield [address for address, _ in running]
        for _, worker in running:
            worker.wait_until(partial(has_no_actors, worker), "the end of what runs there")
        for number, code, (_, worker) in zip((SIGTERM, SIGINT), (0, 130), running, strict=True):
            worker.process.send_signal(number)
            assert worker.wait(30) == code
            assert worker.left_behind(10) == []


def is_listening(worker: Run, address: str) -> bool:
    return f"worker: listening on {address}" in worker.log.read_text()


def has_no_actors(worker: Run) -> bool:
    commands = [word for process in worker.processes() for word in process.cmdline()]
    return not any("bootstrap_main" in word for word in commands)


def train_on(addresses: list[str], root: Path, name: str, *more: str) -> Path:
    """The directory of a run on these hosts that ended well and left no process behind."""
    words = options(root, name, *more, "--launch.allow-plain-tcp", "--launch.attach", *addresses)
    Run(words, log=root / f"{name}.log", environment=PATIENT).require_success()
    return root / name


@pytest.mark.soak
def test_replicas_on_one_host_and_the_trainer_on_another_train_and_leave_the_workers(
    tmp_path: Path,
) -> None:
    with workers(tmp_path) as addresses:
        run_dir = train_on(addresses, tmp_path, "far", *STEPS, *ONE_REPLICA)
        require_audit(run_dir)
        said = (tmp_path / "far.log").read_text()
        assert "host0: 1 replica; host1: trainer" in said
        train_on(addresses, tmp_path, "next", "--dry-run")  # they serve the next command
        assert "host0: tcp://127.0.0.2:" in (tmp_path / "next.log").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_on_two_hosts_is_the_run_on_one(tmp_path: Path, ranks: int) -> None:
    """Token for token and bit for bit; with 2 trainer ranks, one on each host."""
    trainer = ("--trainer.data-parallel-shard", str(ranks))
    if ranks == 2:
        trainer = (*trainer, "--launch.trainer-hosts", "0", "1")
    with workers(tmp_path) as addresses:
        far = train_on(addresses, tmp_path, "far", *STEPS, *trainer)
    near = train(tmp_path, "near", *STEPS, *trainer[:2])
    require_audit(far)
    assert tokens(far) == tokens(near)
    assert weights(far) == weights(near)


def tokens(run_dir: Path) -> dict[str, list[list[int]]]:
    """What was sampled, by rollout."""
    return {
        row["rollout_id"]: [turn["token_ids"] for turn in row["turns"]]
        for row in read_rollouts(run_dir)
    }
