"""Relations between the time-outs of a run.

A limit that detects a stuck part must be longer than the part may take when it is not stuck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torchtitan_rl.agents.task import AgentTask
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.environments.mcp import STARTS_PER_CORE, McpServer, McpTask, parts_of
from torchtitan_rl.environments.open_env import OpenEnvTask
from torchtitan_rl.rollout.task import Task


def timeout_errors(config: RunConfig) -> list[str]:
    """One message per field."""
    rollout, sync, schedule = config.rollout, config.weight_sync, config.schedule
    request_s = config.generator.request_timeout_s
    whole = {"rollout.rollout_timeout_s": rollout.rollout_timeout_s}
    errors = [
        _at_most("rollout.step_timeout_s", rollout.step_timeout_s, whole),
        _at_most("generator.request_timeout_s", request_s, whole) if request_s is not None else "",
        _at_most(
            "weight_sync.lag_timeout_s",
            sync.lag_timeout_s,
            {"weight_sync.timeout_s": sync.timeout_s},
        ),
        _more_than(
            "schedule.max_wait_s",
            schedule.max_wait_s,
            {
                "schedule.report_wait_s": schedule.report_wait_s,
                "rollout.rollout_timeout_s": rollout.rollout_timeout_s,
                "weight_sync.timeout_s": sync.timeout_s,
            },
        ),
    ]
    if isinstance(config.task, AgentTask):
        errors.append(
            _more_than(
                "endpoint.session_timeout_s",
                config.endpoint.session_timeout_s,
                {"rollout.step_timeout_s": rollout.step_timeout_s},
            )
        )
    step_limit = {"rollout.step_timeout_s": rollout.step_timeout_s}
    for name, part in parts_of(config.task):
        for limit in _limits_within_a_step(part):
            errors.append(_less_than(f"{name}.{limit}", getattr(part, limit), step_limit))
    return [error for error in errors if error]


def start_notes(
    task: Task, *, step_timeout_s: float, num_rollouts: int, num_cores: int
) -> list[str]:
    """Where MCP servers of so many rollouts, which begin at once, may not start within a step."""
    at_once = STARTS_PER_CORE * num_cores
    notes = []
    for name, part in parts_of(task):
        servers = part.servers.values() if isinstance(part, McpTask) else ()
        starts = [one.start_timeout_s for one in servers if one.command and not one.shared]
        number = num_rollouts * len(starts)
        rounds = math.ceil(number / at_once)
        if rounds * max(starts, default=0.0) > step_timeout_s:
            notes.append(
                f"warning: {name}.servers: {num_rollouts} rollouts at once start {number} servers, "
                f"{at_once} at a time: where a start takes more than "
                f"{step_timeout_s / rounds:.2g} s, the last ones are not there within "
                f"rollout.step_timeout_s ({step_timeout_s:g} s) and their rollouts fail; raise "
                "that, share servers without state (shared), or, if each start takes less, say so "
                "by start_timeout_s"
            )
    return notes


def _limits_within_a_step(part: Task | McpServer) -> tuple[str, ...]:
    if isinstance(part, McpServer):
        return ("start_timeout_s", "call_timeout_s")
    return ("connect_timeout_s",) if isinstance(part, OpenEnvTask) else ()


def _at_most(name: str, value: float, bounds: Mapping[str, float]) -> str:
    broken = {other: bound for other, bound in bounds.items() if value > bound}
    return f"{name} is {value}: give at most {_listed(broken)}" if broken else ""


def _less_than(name: str, value: float, bounds: Mapping[str, float]) -> str:
    broken = {other: bound for other, bound in bounds.items() if value >= bound}
    return f"{name} is {value}: give less than {_listed(broken)}" if broken else ""


def _more_than(name: str, value: float, bounds: Mapping[str, float]) -> str:
    broken = {other: bound for other, bound in bounds.items() if value <= bound}
    if not broken:
        return ""
    return f"{name} is {value}: give more than {_listed(broken)}, or it ends work that is not stuck"


def _listed(bounds: Mapping[str, float]) -> str:
    return " and ".join(f"{name} ({bound})" for name, bound in bounds.items())
