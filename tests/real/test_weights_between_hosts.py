"""Weights between hosts: `weights_between_hosts_scenario`, in a process with its own transport."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.real.runs import ROOT

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("hosts")
    command = [sys.executable, "-m", "tests.real.weights_between_hosts_scenario", str(root)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_the_parts_of_two_ranks_arrive_whole_on_each_host(result: dict[str, Any]) -> None:
    digests = [version["own"] for version in result["versions"]]
    assert len(set(digests)) == len(digests)
    for version in result["versions"]:
        assert version["arrived"] == [version["own"]] * 4
        assert sum(version["sources"]) == version["whole"]
        assert min(version["sources"]) > version["whole"] / 3  # each rank offers its shards


def test_a_host_fetches_a_version_once_for_all_its_replicas(result: dict[str, Any]) -> None:
    for version in result["versions"]:
        assert version["bytes"] == [version["whole"]] * 2


def test_a_wrong_byte_is_found_and_named(result: dict[str, Any]) -> None:
    assert result["damage"] == [
        f"version 7: model.norm arrived damaged twice at host {host} from trainer rank 0 (the "
        "checksums differ), or trainer rank 0 has replaced the version"
        for host in (1, 2)
    ]


def test_a_fetching_process_that_dies_is_replaced(result: dict[str, Any]) -> None:
    assert result["lost"] == 2


def test_a_host_whose_source_is_cut_off_reads_from_the_trainer(result: dict[str, Any]) -> None:
    assert result["cut off"] == [10, 10]
