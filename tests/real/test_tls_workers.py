"""Who may take part in a run: Monarch's workers with TLS keys, others' keys and none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.real.runs import ROOT, TINY
from torchtitan_rl.commands import cli
from torchtitan_rl.commands.attaching import probe_errors
from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.interfaces import free_port
from torchtitan_rl.launch.keys import create

CLI = (sys.executable, "-m", "torchtitan_rl.commands.cli")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours") / "keys"
    create(folder, ["127.0.0.1", "127.0.0.2"], days=30)
    return folder


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs") / "keys"
    create(folder, ["127.0.0.1", "127.0.0.3"], days=30)
    return folder


@pytest.fixture(scope="module")
def workers(keys: Path, other_keys: Path) -> Iterator[dict[str, str]]:
    """Their addresses: with our keys, with keys of another authority, plain."""
    ours = f"tls://127.0.0.2:{free_port('127.0.0.2')}"
    theirs = f"tls://127.0.0.3:{free_port('127.0.0.3')}"
    plain = f"tcp://127.0.0.4:{free_port('127.0.0.4')}"
    options = {
        "ours": [ours, "--keys", str(keys)],
        "theirs": [theirs, "--keys", str(other_keys)],
        "plain": [plain, "--allow-plain-tcp"],
    }
    with ExitStack() as stack:
        started = []
        for words in options.values():
            worker = subprocess.Popen(
                [*CLI, "worker", "--address", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            started.append(worker)
        for worker in started:
            assert worker.stdout is not None
            assert "listening on" in worker.stdout.readline()
        yield {name: words[0] for name, words in options.items()}


def test_workers_that_cannot_be_attached_end_the_run_with_their_causes(
    workers: dict[str, str], keys: Path, tmp_path: Path
) -> None:
    ours, theirs = workers["ours"], workers["theirs"]
    plain = workers["plain"].replace("tcp:", "tls:")
    own = f"tls://127.0.0.1:{free_port()}"
    launch = ["--launch.attach", ours, theirs, plain, "--launch.address", own]
    launch += ["--launch.keys", str(keys)]
    done = subprocess.run(
        [*CLI, "train", str(TINY), "--output-dir", str(tmp_path), *launch],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    of_theirs, of_plain = done.stderr.splitlines()
    assert of_theirs.startswith(f"error: launch.attach is '{theirs}': the worker's certificate is")
    assert "of another authority" in of_theirs
    assert of_plain.startswith(f"error: launch.attach is '{plain}': it hung up at the TLS greeting")


@pytest.mark.parametrize(
    ("address", "fix"),
    [
        ("tls://127.0.0.2:26600", "tls:// needs --keys"),
        ("tcp://10.0.0.2:26600", "tcp:// is neither encrypted nor authenticated"),
        ("tcp://127.0.0.2:26600", "tcp:// is neither encrypted nor authenticated"),
        ("tls://0.0.0.0:26600", "that is every interface of the machine"),
    ],
)
def test_a_worker_that_could_not_be_trusted_does_not_start(
    address: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["worker", "--address", address]) == 2
    assert capsys.readouterr().err.startswith(f"error: --address is '{address}': {fix}")


def test_a_controller_without_keys_is_told_that_the_worker_speaks_tls(
    workers: dict[str, str],
) -> None:
    plain = Address.parse(workers["ours"].replace("tls:", "tcp:"))
    (error,) = probe_errors("launch.attach", [plain, Address.parse(workers["plain"])], None)
    assert f"it speaks TLS; give {workers['ours']}, and keys" in error


def attach(worker: str, keys: Path, *, timeout_s: int) -> subprocess.CompletedProcess[str]:
    """By Monarch, without a look at the worker before."""
    own = f"tls://127.0.0.1:{free_port()}"
    return subprocess.run(
        [sys.executable, "-m", "tests.real.attach_scenario", worker, own, keys, f"{timeout_s}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_monarch_attaches_with_our_keys_and_refuses_a_controller_with_others(
    workers: dict[str, str], keys: Path, other_keys: Path
) -> None:
    refused = attach(workers["ours"], other_keys, timeout_s=5)
    assert refused.returncode != 0
    assert "attached" not in refused.stdout
    accepted = attach(workers["ours"], keys, timeout_s=60)
    assert accepted.stdout.splitlines()[-1:] == ["attached"], accepted.stderr[-2000:]
