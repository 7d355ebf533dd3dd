"""A whole run between two hosts with TLS keys: nothing listens where it was not told to."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.hosts.harness import Host, make_hosts, namespaces_are_allowed, python
from tests.real.runs import options, read_metrics, require_audit
from torchtitan_rl.launch.keys import create

_CLI = python("-m", "torchtitan_rl.commands.cli")
_TIMEOUT_S = 600.0
_LISTENING = "0A"  # in /proc/net/tcp


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        time.sleep(0.1)


def listening_on(host: Host) -> set[str]:
    """The IP addresses of all listening sockets of its network."""
    network = Path(f"/proc/{host.processes()[0].pid}/net")
    rows = [line.split() for name in ("tcp", "tcp6") for line in (network / name).open()]
    return {_ip(row[1].partition(":")[0]) for row in rows if row[3] == _LISTENING}


def _ip(text: str) -> str:
    """From the kernel's form, 32-bit words in the machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


@pytest.mark.skipif(not namespaces_are_allowed(), reason="hosts share the machine's network")
@pytest.mark.soak
def test_a_run_over_tls_listens_on_the_given_addresses_alone(tmp_path: Path) -> None:
    """Its trainer has a rank on each host, which is allowed by name."""
    run_dir, keys = tmp_path / "run", tmp_path / "keys"
    with make_hosts(2) as (here, there):
        create(keys, [here.address, there.address], days=30)
        address = f"tls://{there.address}:26600"
        log = tmp_path / "worker.log"
        words = [*_CLI, "worker", "--address", address, "--keys", str(keys)]
        worker = there.start(words, log=log)
        wait_until(lambda: f"listening on {address}" in worker.text(), "the worker")
        words = options(
            tmp_path,
            "run",
            *("--num-steps", "2", "--trainer.data-parallel-shard", "2", "--endpoint.enabled"),
            *("--launch.attach", "local", address, "--launch.trainer-hosts", "0", "1"),
            *("--launch.address", f"tls://{here.address}:26600", "--launch.keys", str(keys)),
            "--launch.allow-plain-tcp",
        )
        run = here.start([*_CLI, "train", *words], log=tmp_path / "log")
        wait_until(lambda: len(read_metrics(run_dir)) > 1 or not run.is_running, "the first step")
        assert run.is_running, run.text()[-3000:]
        seen = listening_on(here), listening_on(there)
        assert run.wait(_TIMEOUT_S) == 0, run.text()[-3000:]
        assert seen == ({here.address, "127.0.0.1"}, {there.address, "127.0.0.1"})
        assert "exchange gradients unencrypted (launch.allow_plain_tcp)" in run.text()
    require_audit(run_dir)
