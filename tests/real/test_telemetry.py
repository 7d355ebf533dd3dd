"""Monarch's telemetry pages of a whole run: what they show, who can read them, when they end."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from tests.real.runs import Run, options
from tests.support.other_user import as_other_user, reach

MODULE = "torchtitan_rl.backends.monarch.telemetry"
REQUEST = b"GET / HTTP/1.0\r\n\r\n"


def start(root: Path) -> tuple[Run, str]:
    """A run, and the address of its telemetry pages."""
    words = options(root, "run", "--num-steps", "4", "--monarch.telemetry")
    run = Run(words, log=root / "log")
    launched = root / "run" / "launch.json"
    run.wait_until(lambda: launched.exists() and '"telemetry":' in launched.read_text(), "pages")
    return run, json.loads(launched.read_text())["telemetry"]


@pytest.mark.soak
def test_pages_show_the_replicas_to_their_user_alone_and_end_with_the_run(tmp_path: Path) -> None:
    run, url = start(tmp_path)
    query = {"sql": "select full_name from actors"}

    def are_shown() -> bool:
        rows = httpx.post(f"{url}/api/query", json=query).raise_for_status().json()["rows"]
        names = " ".join(row["full_name"] for row in rows)
        return "generator" in names and "replica0-0" in names and "replica1-0" in names

    run.wait_until(are_shown, "replicas")
    assert "<title>" in httpx.get(url).text
    assert httpx.get(url, headers={"Host": "example.org"}).status_code == 400
    assert run.listening_on() == {"127.0.0.1"}
    (pages,) = [one for one in run.processes() if MODULE in one.cmdline()]
    sockets = pages.net_connections("inet")
    ports = {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN}
    assert len(ports) == 2  # the pages, and Monarch's administration
    for port in ports:
        address = ("127.0.0.1", port)
        assert reach(socket.AF_INET, address, REQUEST) == "open"
        if os.geteuid() == 0:
            assert as_other_user(lambda at=address: reach(socket.AF_INET, at, REQUEST)) == "closed"
    run.require_success()
    said = run.log.read_text()
    assert f"Monarch's telemetry: {url}" in said
    assert "is lost" not in said


@pytest.mark.soak
def test_pages_end_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    run, _ = start(tmp_path)
    run.process.kill()
    run.process.wait()
    assert run.left_behind() == []
