"""What a whole run does when one of its processes is killed; see test_main_job for the trainer,
test_async_run for the controller, test_other_users for an endpoint that is not restarted."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.real.runs import (
    ONE_REPLICA,
    ROOT,
    SMALL,
    Run,
    options,
    read_metrics,
    require_audit,
)
from tests.real.served import serve
from torchtitan_rl.failures import Sign
from torchtitan_rl.observability.failures import read_failures

POLICY = ROOT / "experiments" / "alphabet_sort" / "policy"


def await_first_step(run: Run, run_dir: Path) -> None:
    run.wait_until(lambda: len(read_metrics(run_dir)) >= 2, "the first step")


@pytest.mark.soak
def test_trap_11_a_run_goes_on_without_a_killed_and_a_stopped_replica_and_ends_cleanly(tmp_path):
    """The one that is stopped (SIGSTOP) answers nothing, at the end neither."""
    more = ("--generator.replicas", "3", "--generator.stall-timeout-s", "15")
    run = Run(options(tmp_path, "run", "--num-steps", "4", *more), log=tmp_path / "log")
    await_first_step(run, tmp_path / "run")
    run.process_of("replica1-rank0").kill()
    stopped = run.process_of("replica2-rank0")
    stopped.suspend()
    run.require_success()
    assert not stopped.is_running()
    said = run.log.read_text()
    assert "Traceback" not in said
    assert "replica1 is lost" in said
    assert "replica2 is lost" in said
    failures = {row["name"]: row for row in read_failures(tmp_path / "run")}
    for name, sign in (("replica1", Sign.ENDED), ("replica2", Sign.STOPPED)):
        row = failures[name]
        print({key: row[key] for key in ("name", "sign", "silent_s", "restart_s", "serve_s")})
        assert row["sign"] == sign
        assert row["successor"] == f"{name}-2" or row["given_up"] == "the run ended first"
    require_audit(tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    # A row has the syncs since the row before it: the last one need not have any.
    assert max(row.get("sync/lost_replicas", 0) for row in rows) >= 1
    assert rows[-1]["policy/version"] == 4
    assert "evaluation/reward_mean" in rows[-1]
    for row in rows[1:]:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/discarded"]


@pytest.mark.soak
@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_killed_and_stopped_replicas_return_once_they_answer_like_another(tmp_path, placement):
    more = ("--generator.replicas", "3", "--placement", placement, "--num-steps", "1000")
    run, run_dir = Run(options(tmp_path, "run", *more), log=tmp_path / "log"), tmp_path / "run"
    await_first_step(run, run_dir)
    run.process_of("replica1-rank0").kill()
    run.process_of("replica2-rank0").suspend()
    run.wait_until(lambda: len(read_failures(run_dir)) == 2, "two reports")
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM, run.log.read_text()[-3000:]
    assert run.left_behind() == []
    rows = {row["name"]: row for row in read_failures(run_dir)}
    assert {name: row["sign"] for name, row in rows.items()} == {
        "replica1": Sign.ENDED,
        "replica2": Sign.STOPPED,
    }
    for name, row in rows.items():
        print(row)
        assert row["successor"] == f"{name}-2"
        assert row["silent_s"] > 0
        assert 0 < row["restart_s"] <= row["serve_s"]
        assert row["detail"].startswith("answers as replica")
    require_audit(run_dir)


@pytest.mark.soak
def test_a_replica_and_the_endpoint_of_serve_return(tmp_path):
    server = serve(tmp_path, POLICY, "--generator.replicas", "2")
    try:
        server.run.process_of("replica1-rank0").kill()
        server.wait_until(
            lambda: "failure of replica1" in server.run.log.read_text(), "a new replica"
        )
        print(server.run.log.read_text())
        assert "replica1-2 takes the place of replica1: answers as replica0 does" in (
            server.run.log.read_text()
        )
        server.wait_until(lambda: server.gauge("replicas_live") == 2, "two replicas")
        endpoint = server.run.process_of("endpoint-rank0")
        endpoint.kill()
        endpoint.wait(60)
        answer = httpx.get(f"{server.url}/v1/models", timeout=300)  # waits for the next process
        assert answer.status_code == 200
        server.wait_until(
            lambda: "failure of endpoint" in server.run.log.read_text(), "the report of the loss"
        )
        server.run.process.terminate()
        assert server.run.wait() == 128 + signal.SIGTERM
        assert server.run.left_behind() == []
    finally:
        server.run.kill_all()


AGENT = ROOT / "configs" / "calculator_agent_tiny.py"


def connections(process: psutil.Process, status: str) -> list[Any]:
    return [one for one in process.net_connections("inet") if one.status == status]


@pytest.mark.soak
def test_a_killed_and_a_stopped_endpoint_return_on_their_port_and_agents_lose_no_turn(tmp_path):
    more = ("--num-steps", "10", "--endpoint.max-restarts", "3", *ONE_REPLICA)
    words = [str(AGENT), *SMALL, "--output-dir", str(tmp_path), "--name", "run", *more]
    run, run_dir = Run(words, log=tmp_path / "log"), tmp_path / "run"
    await_first_step(run, run_dir)
    ports = set()
    for number, name in enumerate(["endpoint", "endpoint-2", "endpoint-3"], start=1):
        process = run.process_of(f"{name}-rank0")
        ports |= {one.laddr.port for one in connections(process, psutil.CONN_LISTEN)}
        while len(connections(process, psutil.CONN_ESTABLISHED)) < 8:
            assert run.process.poll() is None
        time.sleep(0.3)  # until requests of some of these agents have reached the engine
        process.kill() if number < 3 else process.suspend()
        again = f"endpoint-{number + 1} serves again"
        run.wait_until(lambda again=again: again in run.log.read_text(), again)
        steps = len(read_metrics(run_dir))
        run.wait_until(lambda steps=steps: len(read_metrics(run_dir)) > steps, "a step")
    run.require_success()
    assert len(ports) == 1
    rows = read_failures(run_dir)
    assert [row["sign"] for row in rows] == [Sign.ENDED, Sign.ENDED, Sign.STOPPED]
    for row in rows:
        print(row)
        assert row["part"] == "endpoint"
        assert 0 < row["restart_s"] <= row["serve_s"]
    assert sum(row["requests_again"] for row in rows) > 0
    for row in read_metrics(run_dir)[1:]:
        assert row["train/rollouts"] == row["train/ended_completed"] == 16
        assert row["train/task/agent/compared_turns"] == row["train/turns_mean"]
        assert row["train/task/agent/token_mismatches"] == 0
        assert row["train/task/agent/unseen_turns"] == 0
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/discarded"]
    require_audit(run_dir)


# Found on PYTHONPATH by every process of a run: the first engine to get to its 40th step never
# returns from it, while its process goes on answering.
WEDGE = """
import os, sys, threading, time

def wedge():
    name = "torchtitan_rl.backends.vllm.engine"
    while not hasattr(engine := sys.modules.get(name), "VllmEngine"):
        time.sleep(0.05)
    step, taken = engine.VllmEngine.step, []

    def wedging_step(self):
        taken.append(None)
        if len(taken) == 40:
            try:
                os.mkdir(os.environ["WEDGED"])
            except FileExistsError:
                pass
            else:
                threading.Event().wait()
        return step(self)

    engine.VllmEngine.step = wedging_step

threading.Thread(target=wedge, daemon=True).start()
"""


@pytest.mark.soak
def test_a_run_goes_on_without_an_engine_that_is_stuck_in_a_process_that_answers(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WEDGE)
    wedged = tmp_path / "wedged"
    more = ("--generator.replicas", "2", "--generator.stall-timeout-s", "15")
    run = Run(
        options(tmp_path, "run", "--num-steps", "4", *more),
        log=tmp_path / "log",
        environment={"PYTHONPATH": f"{tmp_path}:{ROOT}", "WEDGED": str(wedged)},
    )
    run.require_success()
    assert wedged.exists()
    said = run.log.read_text()
    assert "Traceback" not in said
    assert "is lost and is started again" in said
    require_audit(tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    # The wedged engine may evaluate version 0, and the other one may hold a later version by then.
    first = [] if "NO EVALUATION after step 0" in said else [0]
    assert [row["step"] for row in rows] == [*first, 1, 2, 3, 4]
    assert rows[-1]["policy/version"] == 4
