"""Runs with adapters on the engines of one ``torchtitan-rl serve --tenants``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.runs import (
    ONE_REPLICA,
    ROOT,
    Run,
    options,
    read_metrics,
    require_audit,
    train,
    weights,
)
from tests.real.served import Served, serve
from torchtitan_rl.config.resume import policy_digest
from torchtitan_rl.serving.config import API_KEY
from torchtitan_rl.tenancy import client
from torchtitan_rl.tenancy.client import OWNER_FILE

POLICY = ROOT / "experiments" / "alphabet_sort" / "policy"
KEY = "secret"
LORA = (
    *("--policy.lora.rank", "4", "--trainer.optimizer.learning-rate", "0.004"),
    *("--trainer.optimizer.decay-steps", "0", *ONE_REPLICA),
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    folder = tmp_path / "serve"
    folder.mkdir()
    rooms = ("--tenants", "2", "--tenant-rank", "8", *ONE_REPLICA)
    served = serve(folder, POLICY, *rooms, key=KEY, environment={API_KEY: KEY})
    try:
        yield served
    finally:
        served.run.kill_all()


def start(server: Served, root: Path, name: str, *more: str) -> Run:
    words = options(root, name, *LORA, "--generator.endpoint", f"{server.url}/v1", *more)
    return Run(words, log=root / f"{name}.log", environment={client.API_KEY: KEY})


def require_exact_logprobs(run_dir: Path) -> None:
    """Those of tokens under the trainer's own version, by the engines and by the trainer."""
    found = [row.get("trainer/age_0/logprob_diff_max") for row in read_metrics(run_dir)]
    differences = [one for one in found if one is not None]
    assert differences
    assert max(differences) < 1e-4


def test_a_run_learns_off_policy_on_the_engines_of_a_server(server: Served, tmp_path: Path) -> None:
    run = start(server, tmp_path, "run", "--num-steps", "4", "--schedule.staleness", "2")
    run.wait_until(lambda: "step 2/4" in run.log.read_text(), "the second step")
    server.wait_until(lambda: server.gauge("tenants") == 1, "the run's place")
    run.require_success()
    require_exact_logprobs(tmp_path / "run")
    server.wait_until(lambda: server.gauge("tenants") == 0, "its place to be free")
    require_audit(tmp_path / "run")


@pytest.mark.soak
def test_two_runs_are_each_as_alone_and_one_is_killed_and_resumed(
    server: Served, tmp_path: Path
) -> None:
    other = ("--seed", "5", "--num-steps", "4")
    alone = [train(tmp_path, "alone", *LORA, "--num-steps", "4")]
    alone.append(train(tmp_path, "other-alone", *LORA, *other))
    run = start(server, tmp_path, "run", "--num-steps", "4")
    killed = start(server, tmp_path, "other", *other)
    killed.wait_until(lambda: "step 2/4" in killed.log.read_text(), "the second step")
    killed.process.send_signal(signal.SIGKILL)
    killed.wait()
    run.require_success()
    start(server, tmp_path, "other", *other, "--checkpoint.resume").require_success()
    for one, expected in zip(("run", "other"), alone, strict=True):
        require_audit(tmp_path / one)
        assert weights(tmp_path / one) == weights(expected)


@pytest.mark.soak
def test_runs_wait_for_a_server_that_comes_back(tmp_path: Path, server: Served) -> None:
    run = start(server, tmp_path, "run", "--num-steps", "6", "--schedule.staleness", "2")
    run.wait_until(lambda: "step 2/6" in run.log.read_text(), "the second step")
    server.run.kill_all()
    folder = tmp_path / "again"
    folder.mkdir()
    rooms = ("--tenants", "1", *ONE_REPLICA, "--endpoint.port", server.url.rpartition(":")[2])
    again = serve(folder, POLICY, *rooms, key=KEY, environment={API_KEY: KEY})
    try:
        run.require_success()
        assert "replica0-2 takes the place of replica0" in run.log.read_text()
        require_exact_logprobs(tmp_path / "run")
        require_audit(tmp_path / "run")
    finally:
        again.run.kill_all()


@pytest.mark.soak
def test_runs_share_replicas_of_two_ranks_and_another_user_with_the_key_reaches_none_of_them(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "serve"
    folder.mkdir()
    rooms = ("--tenants", "2", "--tenant-rank", "8", *ONE_REPLICA)
    rooms = (*rooms, "--generator.tensor-parallel", "2")
    served = serve(folder, POLICY, *rooms, key=KEY, environment={API_KEY: KEY})
    try:
        other = ("--seed", "5", "--num-steps", "3")
        runs = [start(served, tmp_path, "run", "--num-steps", "3")]
        runs.append(start(served, tmp_path, "other", *other))
        served.wait_until(lambda: served.gauge("tenants") == 2, "both runs' places")
        if os.geteuid() == 0:
            for name in ("run", "other"):
                try_as_another_user(served.url, tmp_path / name)
        for run, name in zip(runs, ("run", "other"), strict=True):
            run.require_success()
            require_exact_logprobs(tmp_path / name)
            require_audit(tmp_path / name)
    finally:
        served.run.kill_all()


def try_as_another_user(url: str, run_dir: Path) -> None:
    """With the key and the run's name, without the secrets in its folder and its process."""
    path = f"{url}/v1/tenants/{run_dir.name}"
    script = f"""
import json, pathlib, urllib.error, urllib.request
def ask(method, path, content=None, lease="x"):
    headers = {{"Authorization": "Bearer {KEY}", "X-Tenant-Lease": lease}}
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(path, content, headers, method=method)
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code
try:
    pathlib.Path({str(run_dir / OWNER_FILE)!r}).read_text()
    raise SystemExit("the owner's secret can be read")
except PermissionError:
    pass
lora = {{"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}}
policy = {policy_digest(POLICY)!r}
thief = {{"owner": "thief", "policy": policy, "max_model_len": 8, **lora}}
print([
    ask("POST", {path!r}, json.dumps(thief).encode()),
    ask("GET", {path!r} + "/messages?after=0"),
    ask("POST", {path!r} + "/messages?number=1", b"x"),
    ask("PUT", {path!r} + "/versions/1?offset=0", b"x"),
    ask("POST", {path!r} + "/versions/1"),
    ask("DELETE", {path!r}),
])
"""
    words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    ran = subprocess.run([*words, python, "-c", script], capture_output=True, text=True, cwd="/")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(ran.stdout) == [409, 410, 410, 410, 410, 410]


def test_a_server_that_is_not_there_ends_the_run_before_a_process_starts(tmp_path: Path) -> None:
    words = options(tmp_path, "run", *LORA, "--generator.endpoint", "http://127.0.0.1:9/v1")
    run = Run(words, log=tmp_path / "log")
    assert run.wait() == 1
    text = run.log.read_text()
    assert "no `torchtitan-rl serve --tenants` is reached at http://127.0.0.1:9/v1" in text
    assert not list((tmp_path / "run" / "logs").glob("trainer*"))
