"""``torchtitan-rl explain`` on files that are damaged, or that somebody else wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_rl.commands.cli import main
from torchtitan_rl.launch.lease import hold_run

STEP = {"kind": "step", "time/step_s": 1.0, "train/reward_mean": 0.5, "trainer/entropy": 1.0}
TURN = {
    "prompt_token_ids": [1],
    "token_ids": [2],
    "logprobs": [-1.0],
    "versions": [0],
    "finish_reason": "stop",
    "replica": "replica0",
    "reward": None,
    "text": "x",
}
LATENCY = {
    "queue_s": 0.0,
    "time_to_first_token_s": 0.0,
    "decode_s": 0.0,
    "inter_token_latency_s": 0.01,
    "cached_tokens": 0,
    "requests_in_flight": 1,
}
ROLLOUT = {
    "step": 9,
    "split": "train",
    "rollout_id": "g/r0",
    "group_id": "g",
    "problem_id": "p",
    "status": "completed",
    "reward": 1.0,
    "cause": None,
    "messages": [],
    "metrics": {},
}
HOSTILE = [None, "x", [], {}, -1, True, 10**400, "\x1b[2J", [[]]]


def explain(run_dir: Path, capsys, *, rows: list[Any], rollouts=(), identity: Any = None) -> str:
    """The output of the command; it may refuse a file, in one line, and must not raise."""
    run_dir.mkdir(exist_ok=True)
    for name, content in (("metrics", rows), ("rollouts", rollouts)):
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (run_dir / f"{name}.jsonl").write_text(lines)
    (run_dir / "identity.json").write_text(json.dumps(identity))
    code = main(["explain", str(run_dir)])
    out, err = capsys.readouterr()
    assert code in (0, 1, 2)
    assert (len(err.splitlines()) == 1) == (code == 2)
    assert all(line.isprintable() for line in (out + err).splitlines())
    return out


def steps(**changes: Any) -> list[dict[str, Any]]:
    named = {name.replace("__", "/"): value for name, value in changes.items()}
    return [STEP | {"step": step} | named for step in range(1, 10)]


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_no_value_of_a_file_stops_it_or_reaches_the_terminal(tmp_path: Path, capsys, value) -> None:
    for name in ("kind", "step", *STEP, "train/ended_env_error", "train/phase_s/reward_mean"):
        explain(tmp_path, capsys, rows=[row | {name: value} for row in steps()])
    for name in ("schedule.staleness", "rollout.sampling.temperature", "num_steps"):
        explain(tmp_path, capsys, rows=steps(), identity={name: value})
    explain(tmp_path, capsys, rows=steps(), identity=value)
    whole = ROLLOUT | {"turns": [TURN | {"metrics": LATENCY}] * 30}
    for name in whole:
        explain(tmp_path, capsys, rows=steps(), rollouts=[whole | {name: value}] * 2)
    for name in TURN:
        turns = [TURN | {"metrics": LATENCY} | {name: value}] * 30
        explain(tmp_path, capsys, rows=steps(), rollouts=[whole, ROLLOUT | {"turns": turns}])
    for name in LATENCY:
        turns = [TURN | {"metrics": LATENCY | {name: value}}] * 30
        explain(tmp_path, capsys, rows=steps(), rollouts=[whole, ROLLOUT | {"turns": turns}])


def test_what_is_written_while_it_reads_does_not_stop_it(tmp_path: Path, capsys) -> None:
    explain(tmp_path, capsys, rows=steps())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"step","st')
    assert main(["explain", str(tmp_path)]) == 0
    assert "training: reward 0.500" in capsys.readouterr().out


def test_a_run_that_was_killed_is_told_from_one_that_is_done(tmp_path: Path, capsys) -> None:
    rows = [{**STEP, "step": step} for step in range(1, 8)]
    said = explain(tmp_path / "killed", capsys, rows=rows, identity={"num_steps": 20})
    assert said.startswith("not running on this machine: ended after step 7 of 20;")
    assert "not running" not in explain(
        tmp_path / "done", capsys, rows=rows, identity={"num_steps": 7}
    )
    with hold_run(tmp_path / "live"):
        assert "not running" not in explain(
            tmp_path / "live", capsys, rows=rows, identity={"num_steps": 20}
        )
