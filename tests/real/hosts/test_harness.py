"""The harness itself: what separates its hosts, and what ends with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.real.hosts.harness import Host, make_hosts, namespaces_are_allowed, python

needs_namespaces = pytest.mark.skipif(
    not namespaces_are_allowed(), reason="network namespaces are not allowed here"
)

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    while True:
        server.accept()[0].close()
"""
CLIENT = """
import socket, sys
socket.create_connection((sys.argv[1], 7000), timeout=0.5).close()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, ...]]:
    with make_hosts(2) as made:
        yield made


def connects(source: Host, target: Host) -> bool:
    return source.start(python("-c", CLIENT, target.address)).wait(20) == 0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def test_a_host_that_is_cut_off_is_not_reached_and_comes_back(hosts):
    one, other = hosts
    server = other.start(python("-c", SERVER, other.address))
    wait_until(lambda: connects(one, other), "the server listens")
    other.cut()
    time.sleep(0.3)
    if namespaces_are_allowed():  # a stopped process still accepts connections
        assert not connects(one, other)
    other.restore()
    wait_until(lambda: connects(one, other), "the host is back")
    server.signal(15)
    assert server.wait(20) == -15


@needs_namespaces
def test_hosts_share_neither_memory_nor_names_nor_process_numbers(hosts, tmp_path):
    one, other = hosts
    assert one.start(["touch", "/dev/shm/of-one"]).wait(20) == 0
    assert one.start(["test", "-e", "/dev/shm/of-one"]).wait(20) == 0
    assert other.start(["test", "-e", "/dev/shm/of-one"]).wait(20) == 1
    log = tmp_path / "log"
    assert other.start(["sh", "-c", "hostname; echo $$"], log=log).wait(20) == 0
    name, pid = log.read_text().split()
    assert name == "host1"
    assert int(pid) < 1000


def test_everything_in_a_host_ends_with_it():
    with make_hosts(1) as (host,):
        orphans = "sleep 1000 & setsid sleep 1000 & wait"
        host.start(["sh", "-c", orphans])
        wait_until(lambda: len(host.processes()) == 3, "all have started")
        inside = host.processes()
    for process in inside:
        assert not process.is_running() or process.status() == "zombie"
