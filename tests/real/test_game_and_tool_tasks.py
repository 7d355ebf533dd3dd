"""One run whose mixture has a gymnasium environment, an OpenEnv server and MCP tools."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.real.runs import ONE_REPLICA, SMALL, Run, read_metrics, read_rollouts, require_audit
from tests.support.servers import ROOT, served
from torchtitan_rl.experiments.calculator_agent.calculator import as_text, calculate
from torchtitan_rl.experiments.calculator_agent.task import CalculatorAgentTask

pytestmark = pytest.mark.soak

NUM_STEPS = 3
CONFIG = """
from dataclasses import replace

from torchtitan_rl import McpServer, McpTask, MixtureTask, OpenEnvTask
from torchtitan_rl.configs import calculator_agent_tiny
from torchtitan_rl.experiments.frozen_lake.task import TASK

base = calculator_agent_tiny.config
calculator = McpTask(
    train=({file!r},),
    system="Solve the problem with the calculator.\\ncalculator(expression): arithmetic",
    answer_pattern=r"The answer is (.*)\\.",
    compare="number",
    renderer="qwen3",
    thinking="keep",
    servers={{
        "calculator": McpServer(
            command=({python!r}, "-m", "tests.support.mcp_server"),
            env={{"PYTHONPATH": {root!r}, "TORCHTITAN_RL_TEST": "$TORCHTITAN_RL_TEST"}},
            shared=True,
            start_timeout_s=300.0,
        )
    }},
    shows_tools=False,
)
guess = OpenEnvTask(url={url!r}, system="", answer_pattern="", action_field="number")
config = replace(
    base,
    task=MixtureTask(
        tasks={{"calculator": calculator, "lake": TASK, "guess": guess}},
        weights={{"calculator": 2.0}},
    ),
    rollout=replace(base.rollout, max_total_tokens=512, step_timeout_s=600.0),
    generator=replace(base.generator, max_model_len=512),
    trainer=replace(base.trainer, max_episode_tokens=512),
    endpoint=replace(base.endpoint, enabled=False),
)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("gymnasium", "mcp", "openenv"):
        pytest.importorskip(package)
    root = tmp_path_factory.mktemp("runs")
    file = root / "sums.jsonl"
    source = CalculatorAgentTask().dataset("train", seed=0)
    problems = [source.next().data for _ in range(200)]
    lines = [{"question": data["text"], "answer": str(data["answer"])} for data in problems]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = root / "config.py"
    with served("tests.support.openenv_server", "64") as port:
        url = f"http://127.0.0.1:{port}"
        config.write_text(CONFIG.format(file=str(file), python=sys.executable, root=ROOT, url=url))
        arguments = [str(config), *SMALL, *ONE_REPLICA, "--num-steps", str(NUM_STEPS)]
        run = Run([*arguments, "--output-dir", str(root), "--name", "all"], log=root / "all.log")
        run.require_success()
    return root / "all"


@pytest.fixture(scope="module")
def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run_dir) if "train/rollouts" in row]


def test_every_part_is_rolled_out_and_scored(rows: list[dict[str, Any]], run_dir: Path) -> None:
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["train/of_task/calculator/groups"] == 2
        assert row["train/of_task/lake/groups"] == row["train/of_task/guess/groups"] == 1
        assert row["train/rollouts"] == 16
        ended = ("completed", "max_turns", "max_tokens")
        assert sum(row.get(f"train/ended_{name}", 0) for name in ended) == 16
    require_audit(run_dir)


def test_calls_reach_the_tools_and_their_answers_the_policy(run_dir: Path) -> None:
    num_right = 0
    for rollout in read_rollouts(run_dir):
        for message, answer in pairwise(rollout["messages"]):
            if not message.get("tool_calls"):
                continue
            assert answer["role"] == "tool"
            if not answer["content"].startswith("error"):
                expression = message["tool_calls"][0]["function"]["arguments"]["expression"]
                assert answer["content"] == as_text(calculate(expression))
                num_right += 1
    assert num_right > 0


def test_what_is_no_action_is_counted(rows: list[dict[str, Any]]) -> None:
    assert any(row["train/task/invalid_actions"] > 0 for row in rows)
    assert any(row["train/task/tool_calls"] > 0 for row in rows)
