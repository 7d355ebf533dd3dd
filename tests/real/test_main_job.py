"""The main job from the command line: real vLLM, torchtitan and Monarch processes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.real.conftest import NUM_STEPS
from tests.real.models import tiny_model
from tests.real.runs import (
    ONE_REPLICA,
    Run,
    options,
    read_metrics,
    read_rollouts,
    require_audit,
    train,
    weights,
)
from torchtitan_rl.config.lora import ADAPTER_FOLDER, ADAPTER_WEIGHTS
from torchtitan_rl.experiments.alphabet_sort_moe.upcycle import POLICY_DIR as MOE_POLICY_DIR
from torchtitan_rl.observability.failures import read_failures


def checkpoint_files(run_dir: Path) -> dict[str, bytes]:
    files = (path for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


def test_a_run_trains_validates_and_accounts_for_every_token(whole):
    rows = read_metrics(whole)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    assert "evaluation/reward_mean" in rows[0]
    assert "evaluation/reward_mean" in rows[-1]
    for row in rows[1:]:
        assert row["policy/version"] == row["step"]
        assert row["policy/staleness_max"] == 0
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/discarded"]
        assert row["tokens/trained"] == row["trainer/trained_tokens"] > 0
        # Version n reaches the replicas during step n + 1 and is counted in that step's row.
        assert row.get("sync/lost_replicas") == (None if row["step"] == 1 else 0)
    assert rows[-1]["account/unaccounted_tokens"] == 0


def test_trap_25_trainer_and_generator_agree_on_the_logprobs_of_every_step(whole):
    """Up to float32 rounding: see test_episode_tokens for the bounds."""
    rows = read_metrics(whole)[1:]
    assert rows[0]["trainer/logprob_diff_max"] < 2e-5
    assert all(row["trainer/logprob_diff_max"] < 3e-5 for row in rows)
    assert all(row["trainer/logprob_diff_mean"] < 2e-6 for row in rows)


def test_outputs_are_where_the_readme_says(whole):
    assert read_rollouts(whole)
    trace = json.loads((whole / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert len({event["pid"] for event in events}) >= 4  # controller, trainer, two replicas
    assert any((whole / "tensorboard").iterdir())
    assert (whole / "checkpoints" / f"step-{NUM_STEPS:06d}").is_dir()
    with safe_open(whole / "policy" / "model.safetensors", "pt") as policy:
        assert {"lm_head.weight", "model.embed_tokens.weight"} & {*policy.keys()}


@pytest.mark.parametrize("diverges", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_trap_28_and_29_a_run_that_stops_diverges_and_loses_its_trainer_ends_with_equal_weights(
    tmp_path: Path, whole: Path, diverges: bool
) -> None:
    """Processes one after the other: each but the last ends after a step of its own, and the last
    loses its trainer. `test_chaos` kills a controller with all its processes."""
    run_dir = tmp_path / "run"
    resumed = ("--checkpoint.resume", *ONE_REPLICA)

    def life(name: str, end: Callable[[Run], object], *more: str) -> tuple[int, str]:
        """Its exit code and log."""
        before = read_metrics(run_dir)
        arguments = options(tmp_path, "run", "--num-steps", str(NUM_STEPS), *more)
        run = Run(arguments, log=tmp_path / f"{name}.log")
        run.wait_until(
            lambda: any(row["step"] and row not in before for row in read_metrics(run_dir)),
            f"a step of the run that is to be {name}",
        )
        end(run)
        code = run.wait()
        assert run.left_behind() == []
        return code, run.log.read_text()

    code, log = life("stopped", lambda run: run.process.terminate(), *ONE_REPLICA)
    assert code == 128 + signal.SIGTERM, log[-3000:]
    require_audit(run_dir)
    saved = checkpoint_files(run_dir)
    assert saved
    if diverges:
        useless = ("--trainer.optimizer.learning-rate", "1e18")
        code, log = life("diverged", lambda run: None, *resumed, *useless)
        assert code == 1, log[-3000:]
        assert re.search(r"^error: DivergedError: .*(loss|grad_norm)", log, re.M)
        assert checkpoint_files(run_dir) == saved
    code, log = life("finished", lambda run: run.process_of("trainer-rank0").kill(), *resumed)
    assert code == 0, log[-3000:]
    assert "resumed after step" in log
    assert "trainer is lost and is started again, from step-" in log
    (failure,) = read_failures(run_dir)
    assert (failure["part"], failure["successor"]) == ("trainer", "trainer-2")
    require_audit(run_dir)
    same = ("step", "policy/version", "train/reward_mean", "trainer/loss", "trainer/weights_digest")
    for one, other in zip(read_metrics(whole), read_metrics(run_dir), strict=True):
        assert [one.get(name) for name in same] == [other.get(name) for name in same]
    assert weights(run_dir) == weights(whole)


def require_equal_when_resumed(root: Path, *policy: str) -> Path:
    """A run of 4 steps, and one of 2 that is resumed for 2 more. Returns the resumed run."""
    # The decay of the learning rate would begin earlier in a run of 2 steps.
    words = (*policy, *ONE_REPLICA, "--trainer.optimizer.decay-steps", "0")
    whole = train(root, "whole", *words, "--num-steps", "4")
    train(root, "parts", *words, "--num-steps", "2")
    parts = train(root, "parts", *words, "--num-steps", "4", "--checkpoint.resume")
    require_audit(parts)
    same = ("step", "policy/version", "train/reward_mean", "trainer/loss", "trainer/weights_digest")
    rows = [[row.get(name) for name in same] for row in read_metrics(parts)]
    assert rows == [[row.get(name) for name in same] for row in read_metrics(whole)]
    assert len({row[-1] for row in rows[1:]}) == 4
    assert weights(parts) == weights(whole)
    return parts


@pytest.mark.soak
def test_a_resumed_run_with_adapters_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    lora = ("--policy.lora.rank", "8", "--trainer.optimizer.learning-rate", "0.004")
    parts = require_equal_when_resumed(tmp_path, *lora)
    adapters = [run / ADAPTER_FOLDER / ADAPTER_WEIGHTS for run in (parts, tmp_path / "whole")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_resumed_run_with_experts_equals_the_uninterrupted_one(
    family: str, tmp_path: Path
) -> None:
    words = ["--policy.checkpoint", str(MOE_POLICY_DIR)]
    if family == "deepseek_v3":  # a random policy, which gets no reward, learns from a teacher
        policy = tiny_model(tmp_path / "policy", family=family, tied=False)
        teacher = tiny_model(tmp_path / "teacher", seed=1)
        words = ["--policy.checkpoint", str(policy), "--teacher.checkpoint", str(teacher)]
        words += ["--teacher.loss", "full", "--rollout.advantage", "none"]
    parts = require_equal_when_resumed(tmp_path, *words)
    # The trainer's routers took the recorded experts.
    assert [row["trainer/routing_mismatch"] for row in read_metrics(parts)[1:]] == [0.0] * 4
