"""Files of other hosts are brought once, under the name of the host that wrote them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.far_hosts import FarAgent, far_host
from torchtitan_rl.backends.monarch.host_watch import _Files
from torchtitan_rl.backends.monarch.runtime import _host_environment, _host_prefix
from torchtitan_rl.observability.trace import Tracer, host_label


async def bring_all(here: Path, *there: Path, log: str) -> None:
    """From a host for each folder, which has the file ``hostN-{log}`` after the run's start."""
    hosts = [far_host(index, FarAgent(here, one)) for index, one in enumerate(there)]
    files = [_Files(host.index, here, ".log") for host in hosts]
    for one, host in zip(files, hosts, strict=True):
        await one.begin(host)
    for host, folder in zip(hosts, there, strict=True):
        (folder / f"host{host.index}-{log}").write_text(f"of {host.index}")
    for _ in range(2):
        for one, host in zip(files, hosts, strict=True):
            await one.bring(host)
    for one in files:
        one.end()


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


WRITTEN = {"host0-a.log": "of 0", "host1-a.log": "of 1"}


@pytest.mark.parametrize("folders", [("there", "there"), ("one", "two"), ("here", "here")])
def test_each_file_is_brought_once_whichever_hosts_share_a_folder(
    tmp_path: Path, folders: tuple[str, str]
) -> None:
    there = [tmp_path / name for name in folders]
    for one in there:
        one.mkdir(exist_ok=True)
    asyncio.run(bring_all(tmp_path / "here", *there, log="a.log"))
    assert contents(tmp_path / "here") == WRITTEN


def test_nothing_is_brought_from_the_controller_s_folder_even_if_that_was_not_seen_at_first(
    tmp_path: Path,
) -> None:
    async def bring() -> None:
        host = far_host(0, FarAgent(tmp_path, tmp_path))
        files = _Files(0, tmp_path, ".log")
        await files.begin(host)
        files._is_shared = False
        (tmp_path / "host0-a.log").write_text("once")
        async with asyncio.timeout(5.0):  # else the file grows by what is read of it, for ever
            await files.bring(host)
        files.end()

    asyncio.run(bring())
    assert contents(tmp_path) == {"host0-a.log": "once"}


def test_processes_of_other_hosts_name_them_in_logs_and_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, near = far_host(1, FarAgent(tmp_path, tmp_path)), far_host(0, None)
    assert (_host_prefix(far), _host_prefix(near)) == ("host1-", "")
    assert _host_environment(near) == {}
    for name, value in _host_environment(far).items():
        monkeypatch.setenv(name, value)
    Tracer(tmp_path, "replica0 rank 0", host=host_label()).close()
    (trace,) = tmp_path.glob("*.jsonl")
    assert trace.name.startswith("host1-replica0-rank-0.")
    assert '"labels":"host1"' in trace.read_text()
