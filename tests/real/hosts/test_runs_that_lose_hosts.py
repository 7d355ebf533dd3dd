"""Whole runs on hosts that are cut off or told to end: trainer and controller on one, a replica on
each of two others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from tests.real.hosts.harness import Host, HostProcess, make_hosts, namespaces_are_allowed, python
from tests.real.runs import SMALL, TIMEOUT_S, TINY, printing_to, read_metrics, require_audit
from torchtitan_rl.observability.failures import read_failures

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not namespaces_are_allowed(), reason="network namespaces are not allowed here"
    ),
]
CLI = ("-m", "torchtitan_rl.commands.cli")
PORT = 26600


class Cluster:
    """Three hosts, workers on the last two. The run folder is shared, ``/dev/shm`` is not."""

    def __init__(self, root: Path, hosts: tuple[Host, ...]) -> None:
        self.root, self.hosts = root, hosts
        self.run_dir = root / "run"
        self.workers = [self.start_worker(host) for host in hosts[1:]]

    def start_worker(self, host: Host) -> HostProcess:
        words = python(*CLI, "worker", "--address", address(host), "--allow-plain-tcp")
        log = self.root / f"{host.name}.log"
        return host.start(words, log=log, environment={"HOME": str(self.root / host.name)})

    def train(self, *more: str) -> HostProcess:
        words = [
            *("train", str(TINY), *SMALL, "--output-dir", str(self.root), "--name", "run"),
            *("--launch.attach", "local", *map(address, self.hosts[1:])),
            *("--launch.address", f"tcp://{self.hosts[0].address}:26700"),
            *("--launch.allow-plain-tcp", "--generator.replicas", "2", *more),
        ]
        return self.hosts[0].start(python(*CLI, *words), log=self.root / "train.log")

    def until(self, run: HostProcess, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert run.is_running, f"{what}: {run.text()[-3000:]}"
            assert time.monotonic() < deadline_s, f"{what}: {run.text()[-3000:]}"
            time.sleep(0.2)

    def num_steps(self) -> int:
        return len(read_metrics(self.run_dir)) - 1

    def runs_on(self, host: Host) -> list[str]:
        """What the run has there, besides the worker."""
        words = [" ".join(process.cmdline()) for process in host.processes()]
        return [one for one in words if "bootstrap_main" in one]


def address(host: Host) -> str:
    return f"tcp://{host.address}:{PORT}"


@contextmanager
def cluster(root: Path) -> Iterator[Cluster]:
    with make_hosts(3) as hosts:
        yield Cluster(root, hosts)


REPLICAS_APART = ("--launch.trainer-hosts", "0", "--launch.generator-hosts", "1", "2")


def test_a_run_goes_on_without_a_host_that_is_cut_off_and_takes_it_back(tmp_path, capsys):
    with cluster(tmp_path) as made:
        run = made.train(*REPLICAS_APART, "--num-steps", "400")
        made.until(run, lambda: made.num_steps() >= 3, "three steps")
        made.hosts[1].cut()
        cut_s, num_steps = time.monotonic(), made.num_steps()
        made.until(run, lambda: "host1 (" in run.text(), "the loss is seen")
        seen_s = time.monotonic() - cut_s
        made.until(run, lambda: made.num_steps() >= num_steps + 3, "steps without it")
        made.hosts[1].restore()
        made.until(run, lambda: "replica0-2 takes the place" in run.text(), "it is back")
        num_steps = made.num_steps()
        made.until(run, lambda: made.num_steps() >= num_steps + 8, "steps with it")
        run.signal(15)  # saves, and ends after this step
        assert run.wait(TIMEOUT_S) == 143, run.text()[-3000:]
        made.until(made.workers[0], lambda: not made.runs_on(made.hosts[1]), "nothing is left")
    require_audit(made.run_dir)
    rows = [row for row in read_metrics(made.run_dir) if row["step"]]
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/discarded"]
    rates = [row["tokens/generated_per_second"] for row in rows]
    replicas = [row["engine/replicas"] for row in rows if "engine/replicas" in row]
    with capsys.disabled():
        print(
            f"\nlost after {seen_s:.1f} s; tok/s with 2 replicas {median(rates[:3]):.0f}, at the "
            f"end {median(rates[-5:]):.0f}; replicas by step: {replicas}"
        )
    assert 1.0 in replicas
    assert replicas[-1] == 2.0


def test_a_run_leaves_a_host_that_is_told_to_end_and_uses_it_when_it_is_back(tmp_path, capsys):
    with cluster(tmp_path) as made:
        run = made.train(*REPLICAS_APART, "--num-steps", "400")
        made.until(run, lambda: made.num_steps() >= 3, "three steps")
        made.workers[0].signal(15)
        told_s, num_steps = time.monotonic(), made.num_steps()
        assert made.workers[0].wait(60) == 0, made.workers[0].text()[-3000:]
        seconds = time.monotonic() - told_s
        made.until(run, lambda: made.num_steps() >= num_steps + 3, "steps without it")
        made.workers[0] = made.start_worker(made.hosts[1])
        made.until(run, lambda: "replica0-2 takes the place" in run.text(), "it is back")
        num_steps = made.num_steps()
        made.until(run, lambda: made.num_steps() >= num_steps + 3, "steps with it")
        run.signal(15)
        assert run.wait(TIMEOUT_S) == 143, run.text()[-3000:]
    require_audit(made.run_dir)
    (failure,) = read_failures(made.run_dir)
    assert (failure["name"], failure["sign"]) == ("host1", "announced")
    rows = [row for row in read_metrics(made.run_dir) if row["step"]]
    replicas = [row["engine/replicas"] for row in rows if "engine/replicas" in row]
    lost = rows[-1]["account/lost_tokens"]
    with capsys.disabled():
        print(f"\nleft after {seconds:.1f} s, lost {lost:.0f} tokens; replicas by step: {replicas}")
    assert lost == 0
    assert 1.0 in replicas
    assert replicas[-1] == 2.0


def test_a_trainer_host_that_is_told_to_end_ends_the_run_with_a_checkpoint(tmp_path):
    away = ("--launch.trainer-hosts", "2", "--launch.generator-hosts", "1", "--num-steps", "400")
    with cluster(tmp_path) as made:
        run = made.train(*away)
        made.until(run, lambda: made.num_steps() >= 2, "two steps")
        made.workers[1].signal(15)
        assert run.wait(TIMEOUT_S) == 143, run.text()[-3000:]
        assert made.workers[1].wait(60) == 0
        assert f"the last checkpoint is of step {made.num_steps()}" in run.text()
    require_audit(made.run_dir)
    assert read_failures(made.run_dir) == []


def test_a_trainer_host_that_is_cut_off_ends_the_run_which_then_resumes(tmp_path):
    away = ("--launch.trainer-hosts", "2", "--launch.generator-hosts", "1", "--num-steps", "8")
    with cluster(tmp_path) as made:
        run = made.train(*away, "--checkpoint.every", "1")
        made.until(run, lambda: made.num_steps() >= 3, "three steps")
        made.hosts[2].cut()
        assert run.wait(TIMEOUT_S) == 1
        said = run.text()
        assert "error: TrainerLostError: " in said
        assert "--checkpoint.resume" in said
        made.hosts[2].restore()
        made.until(made.workers[1], lambda: not made.runs_on(made.hosts[2]), "nothing is left")
        again = made.train(*away, "--checkpoint.every", "1", "--checkpoint.resume")
        assert again.wait(TIMEOUT_S) == 0, again.text()[-3000:]
    require_audit(made.run_dir)
    assert any(row["part"] == "trainer" and row["given_up"] for row in read_failures(made.run_dir))


def test_a_killed_controller_leaves_no_process_on_any_host_after_a_minute(tmp_path):
    with cluster(tmp_path) as made:
        run = made.train(*REPLICAS_APART, "--num-steps", "400")
        made.until(run, lambda: made.num_steps() >= 1, "a step")
        run.signal(9)
        assert run.wait(20) == -9
        deadline_s = time.monotonic() + 60
        while any(map(made.runs_on, made.hosts)):
            assert time.monotonic() < deadline_s, [made.runs_on(host) for host in made.hosts]
            time.sleep(0.5)
        shared = [
            host.start(["sh", "-c", "! ls /dev/shm | grep -q torchtitan-rl"]) for host in made.hosts
        ]
        assert [one.wait(20) for one in shared] == [0, 0, 0]


@pytest.mark.parametrize(
    ("trainer", "generators"), [("0", ("1", "2")), ("2", ("1",))], ids=["here", "there"]
)
def test_replicas_on_other_hosts_get_the_weights_of_a_trainer_that_was_started_again(
    tmp_path, trainer, generators
):
    hosts = ("--launch.trainer-hosts", trainer, "--launch.generator-hosts", *generators)
    with cluster(tmp_path) as made:
        run = made.train(*hosts, "--num-steps", "8", "--checkpoint.every", "2")
        made.until(run, lambda: made.num_steps() >= 3, "three steps")
        (lost,) = (
            process
            for host in made.hosts
            for process in host.processes()
            if "trainer-rank0.log" in printing_to(process)
        )
        lost.kill()
        assert run.wait(TIMEOUT_S) == 0, run.text()[-3000:]
        (failure,) = read_failures(made.run_dir)
        print(failure)
        assert failure["successor"] == "trainer-2"
        assert failure["serve_s"] is not None
        require_audit(made.run_dir)
