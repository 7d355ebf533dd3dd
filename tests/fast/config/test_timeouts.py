from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.config_mutations import with_value
from torchtitan_rl.config.checks.timeouts import start_notes, timeout_errors
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.configs.calculator_agent_tiny import config as AGENTS
from torchtitan_rl.environments.mcp import McpServer, McpTask
from torchtitan_rl.environments.mixture import MixtureTask
from torchtitan_rl.environments.open_env import OpenEnvTask
from torchtitan_rl.rollout.task import Task

CONFIG = RunConfig(policy=PolicyConfig(checkpoint="x"), task=Task())


def changed(config: RunConfig, **changes: Any) -> RunConfig:
    for name, value in changes.items():
        config = with_value(config, name.replace("__", "."), value)
    return config


def test_a_request_has_the_time_of_its_rollout_where_nothing_else_is_said() -> None:
    config = changed(CONFIG, rollout__rollout_timeout_s=5000.0)
    assert config.request_timeout_s == 5000.0
    assert changed(config, generator__request_timeout_s=10.0).request_timeout_s == 10.0
    assert timeout_errors(config) == []


def test_the_defaults_leave_a_long_generation_its_hour() -> None:
    assert CONFIG.request_timeout_s >= 3600.0
    assert CONFIG.schedule.max_wait_s > CONFIG.rollout.rollout_timeout_s


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"rollout__step_timeout_s": 4000.0},
            "rollout.step_timeout_s is 4000.0: give at most rollout.rollout_timeout_s (3600.0)",
        ),
        (
            {"generator__request_timeout_s": 4000.0},
            "generator.request_timeout_s is 4000.0: give at most rollout.rollout_timeout_s "
            "(3600.0)",
        ),
        (
            {"weight_sync__lag_timeout_s": 301.0},
            "weight_sync.lag_timeout_s is 301.0: give at most weight_sync.timeout_s (300.0)",
        ),
        (
            {"rollout__rollout_timeout_s": 8000.0},
            "schedule.max_wait_s is 7200.0: give more than rollout.rollout_timeout_s (8000.0), or "
            "it ends work that is not stuck",
        ),
        (
            {"schedule__max_wait_s": 50.0},
            "schedule.max_wait_s is 50.0: give more than schedule.report_wait_s (60.0) and "
            "rollout.rollout_timeout_s (3600.0) and weight_sync.timeout_s (300.0), or it ends "
            "work that is not stuck",
        ),
    ],
)
def test_a_limit_that_contradicts_another_is_one_line(
    changes: dict[str, float], error: str
) -> None:
    assert timeout_errors(changed(CONFIG, **changes)) == [error]


def test_an_agents_session_outlives_its_longest_pause(tmp_path: Path) -> None:
    config = changed(replace(AGENTS, output_dir=tmp_path), rollout__step_timeout_s=900.0)
    (error,) = timeout_errors(config)
    assert error.startswith("endpoint.session_timeout_s is 600.0: give more than")
    assert timeout_errors(replace(config, task=Task())) == []


def test_servers_of_all_rollouts_that_may_not_start_within_a_step_are_warned_of() -> None:
    def notes(*servers: McpServer, num_rollouts: int = 9) -> list[str]:
        named = {f"s{number}": server for number, server in enumerate(servers)}
        return start_notes(
            MixtureTask(tasks={"one": McpTask(train=("a",), servers=named)}),
            step_timeout_s=60.0,
            num_rollouts=num_rollouts,
            num_cores=2,
        )

    one = McpServer(command=("true",), start_timeout_s=20.0)
    assert notes(one, num_rollouts=8) == []  # 4 at a time, so two rounds of at most 20 s
    assert notes(one, num_rollouts=12) == []
    assert notes(one, num_rollouts=13) == [
        "warning: task.tasks.one.servers: 13 rollouts at once start 13 servers, 4 at a time: where "
        "a start takes more than 15 s, the last ones are not there within rollout.step_timeout_s "
        "(60 s) and their rollouts fail; raise that, share servers without state (shared), or, if "
        "each start takes less, say so by start_timeout_s"
    ]
    assert len(notes(one, one)) == 1  # 18 servers
    others = replace(one, shared=True), McpServer(url="http://a", start_timeout_s=20.0)
    assert notes(one, *others) == []


def test_a_tool_has_less_time_than_the_step_that_calls_it() -> None:
    server = McpServer(command=("true",), start_timeout_s=59.0, call_timeout_s=100.0)
    task = McpTask(train=("a",), servers={"s": server, "right": McpServer(command=("true",))})
    message = "s.call_timeout_s is 100.0: give less than rollout.step_timeout_s (60.0)"
    assert timeout_errors(replace(CONFIG, task=task)) == [f"task.servers.{message}"]
    game = OpenEnvTask(url="http://a", connect_timeout_s=60.0)
    both = MixtureTask(tasks={"one": game, "two": task})
    assert timeout_errors(replace(CONFIG, task=both)) == [
        "task.tasks.one.connect_timeout_s is 60.0: give less than rollout.step_timeout_s (60.0)",
        f"task.tasks.two.servers.{message}",
    ]
