"""Launchers on two nodes, with a scripted controller and scripted workers: exit codes, signals,
restarts, and what they leave behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.hosts.nodes import Nodes, wait_until

WORDS = ("tests.support.scripted_program", "launch", "alphabet_sort_tiny", "--num-steps", "2")
PLAIN = "--launch.allow-plain-tcp"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("SCRIPTED_DIR", str(tmp_path))
    monkeypatch.setenv("SCRIPTED_CONTROLLER", "exit 0")
    made = Nodes(tmp_path, (*WORDS, PLAIN))
    yield made
    made.kill_all()


def controllers(nodes: Nodes) -> list[list[str]]:
    """The options that each controller was started with."""
    lines = (nodes.folder / "controllers.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def attached(words: list[str]) -> list[str]:
    rest = words[words.index("--launch.attach") + 1 :]
    return rest[: rest.index("--launch.address")]


@pytest.mark.soak  # the next test has all of it, with another code
def test_all_exit_with_the_code_of_the_controller_which_has_all_workers_in_order(nodes) -> None:
    nodes.start(0, SCRIPTED_CONTROLLER="exit 3")
    nodes.start(1)
    assert nodes.wait() == [3, 3]
    (words,) = controllers(nodes)
    assert words[:3] == ["alphabet_sort_tiny", "--num-steps", "2"]
    for node, address in enumerate(attached(words)):
        assert nodes.log(node) == f"worker: listening on {address}\n"
    assert "--checkpoint.resume" not in words


def test_a_worker_that_ends_is_started_again_and_a_signal_to_all_nodes_comes_once(nodes) -> None:
    """Two signals would end a run without a checkpoint."""
    nodes.start(0, SCRIPTED_CONTROLLER="wait")
    nodes.start(1)
    wait_until((nodes.folder / "waits").exists, "a controller")
    (words,) = controllers(nodes)
    assert words[:3] == ["alphabet_sort_tiny", "--num-steps", "2"]
    assert "--checkpoint.resume" not in words
    for node, address in enumerate(attached(words)):
        assert nodes.log(node) == f"worker: listening on {address}\n"
    nodes.process_of("worker", address).kill()
    wait_until(lambda: nodes.log(1).count("listening on") == 2, "another worker")
    assert nodes.process_of("worker", address)
    assert "node 1: its worker ended with code 137 and is started again" in nodes.log(1)
    for launcher in nodes.launchers:
        launcher.send_signal(signal.SIGTERM)
    assert nodes.wait() == [128 + signal.SIGTERM] * 2
    assert (nodes.folder / "signals").read_text() == "1"


@pytest.mark.soak
def test_a_node_whose_worker_does_not_start_ends_the_run_before_it_begins(nodes) -> None:
    nodes.start(0)
    nodes.start(1, SCRIPTED_WORKER="fail")
    assert nodes.wait() == [1, 1]
    assert "error: LauncherError: node 1: the worker ended with code 1" in nodes.log(0)
    assert not (nodes.folder / "controllers.jsonl").exists()


@pytest.mark.soak
def test_a_node_whose_options_are_wrong_ends_the_run_with_2(nodes) -> None:
    nodes.start(0)
    nodes.start(1, "--launch.interface", "eth77")
    assert nodes.wait() == [2, 2]
    assert "error: node 1: launch.interface is 'eth77': this node has no such" in nodes.log(0)
    assert nodes.log(1) == ""


@pytest.mark.soak
def test_when_the_launcher_of_rank_0_is_killed_all_end(nodes) -> None:
    nodes.start(0, SCRIPTED_CONTROLLER="wait")
    nodes.start(1)
    wait_until((nodes.folder / "waits").exists, "a controller")
    nodes.launchers[0].kill()
    assert nodes.wait() == [-signal.SIGKILL, 1]
    assert (nodes.folder / "signals").exists()  # the controller was told to stop


@pytest.mark.soak
def test_a_restart_of_torchrun_resumes_on_new_workers(nodes) -> None:
    for _ in range(2):
        nodes.start_torchrun(["--max-restarts=1"], SCRIPTED_CONTROLLER="fail once")
    assert nodes.wait() == [0, 0], nodes.log(0)
    first, second = controllers(nodes)
    assert "--checkpoint.resume" not in first
    assert "--checkpoint.resume" in second
    assert set(attached(first)).isdisjoint(attached(second))


@pytest.mark.soak
def test_a_node_that_comes_back_restarts_the_run_on_new_workers(nodes, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # see docs/clusters.md
    for _ in range(2):
        nodes.start_torchrun(["--max-restarts=1"], SCRIPTED_CONTROLLER="wait")
    wait_until((nodes.folder / "waits").exists, "a controller")
    nodes.launchers[1].kill()  # torchrun's agent, and with it its launcher
    wait_until((nodes.folder / "signals").exists, "the end of the first controller")
    nodes.start_torchrun(["--max-restarts=1"])
    wait_until(lambda: len(controllers(nodes)) == 2, "a second controller")
    first, second = controllers(nodes)
    assert set(attached(first)).isdisjoint(attached(second))
    assert (nodes.folder / "signals").read_text() == "1"
    nodes.kill_all()


@pytest.mark.soak
def test_a_signal_to_one_torchrun_ends_all_of_them(nodes) -> None:
    for _ in range(2):
        nodes.start_torchrun([], SCRIPTED_CONTROLLER="wait")
    wait_until((nodes.folder / "waits").exists, "a controller")
    nodes.launchers[1].send_signal(signal.SIGINT)
    assert all(code != 0 for code in nodes.wait())
    assert (nodes.folder / "signals").read_text() == "1"
