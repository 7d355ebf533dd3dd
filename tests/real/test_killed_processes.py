"""What a whole run does when one of its processes is killed; see test_main_job for the trainer,
test_async_run for the controller, test_other_users for the endpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.runs import ROOT, Run, options, read_metrics, require_audit
from torchtitan_rl.failures import Sign
from torchtitan_rl.observability.failures import read_failures


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
