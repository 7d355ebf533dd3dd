"""Programs that a policy writes, run in the sandbox during a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.real.runs import (
    ONE_REPLICA,
    ROOT,
    SMALL,
    Run,
    read_metrics,
    read_rollouts,
    require_audit,
)
from torchtitan_rl import SandboxConfig

NUM_STEPS = 2


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    kinds = ("namespaces", "landlock")
    allowed = [kind for kind in kinds if not SandboxConfig(isolation=kind).errors("sandbox")]
    if not allowed:
        pytest.skip("this machine allows neither namespaces nor Landlock")
    arguments = ["code_interpreter_tiny", *SMALL, *ONE_REPLICA, "--num-steps", str(NUM_STEPS)]
    arguments += ["--task.sandbox.isolation", allowed[0]]
    run = Run([*arguments, "--output-dir", str(root), "--name", "code"], log=root / "code.log")
    run.require_success()
    return root / "code"


def test_each_rollout_is_completed_and_one_episode(run_dir: Path) -> None:
    rows = [row for row in read_metrics(run_dir) if "train/rollouts" in row]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row in rows:
        assert row["train/ended_env_error"] == 0
        assert row["train/task/tool_calls"] > 0
        assert row["train/rollouts"] == 16
    require_audit(run_dir)


def test_what_a_program_printed_is_what_the_policy_read(run_dir: Path) -> None:
    num_read = 0
    for rollout in read_rollouts(run_dir):
        right_code = f"print({rollout['problem']['expression']})"
        messages = rollout["messages"]
        for message, before in zip(messages[1:], messages, strict=False):
            if message["role"] == "tool":
                num_read += 1
                if code_of(before) == right_code:
                    assert message["content"] == rollout["problem"]["answer"]
    assert num_read > 0


def test_no_process_of_the_sandbox_is_left(run_dir: Path) -> None:
    for process in psutil.process_iter(["cmdline", "ppid"]):
        is_ours = str(ROOT) in (process.info["cmdline"] or ())
        is_zygote = "sandbox.zygote" in " ".join(process.info["cmdline"] or ())
        assert not (is_ours and is_zygote and process.info["ppid"] == 1)  # others have a parent


def code_of(message: dict[str, Any]) -> str | None:
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, dict):
            return str(arguments.get("code"))
    return None
