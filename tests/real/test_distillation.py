"""Whole runs with a teacher: on replicas, one of which is killed, and behind a server's URL."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.real.runs import Run, options, read_metrics, read_rollouts, require_audit
from tests.real.served import serve
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR

pytestmark = pytest.mark.soak

ALL = ("--metrics.rollouts-per-step", "all", "--evaluation.num-problems", "0")
ALONE = ("--rollout.advantage", "none")
NOISE = 0.35  # of the weights' standard deviation


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run_dir) if "train/rollouts" in row]


def noisy_policy(folder: Path) -> Path:
    """The embedded policy with noise on its weights."""
    shutil.copytree(POLICY_DIR, folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(POLICY_DIR / "model.safetensors")
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
        weights[name] = (weight + NOISE * noise).to(weight.dtype) if weight.ndim > 1 else weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_policy_that_teaches_itself_has_advantages_of_0(tmp_path: Path) -> None:
    """And one that was trained on them comes back as it was from a run on the recorded scores."""
    teacher = ("--teacher.checkpoint", str(POLICY_DIR))
    first = options(tmp_path, "run", "--num-steps", "2", *ALL, *ALONE, *teacher)
    Run(first, log=tmp_path / "log").require_success()
    require_audit(tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    of_first = [turn for row in read_rollouts(tmp_path / "run") for turn in row["turns"]]
    of_first = [turn for turn in of_first if set(turn["versions"]) == {0}]
    assert len(of_first) > 16
    for turn in of_first:
        assert len(turn["advantages"]) == len(turn["token_ids"])
        assert max(map(abs, turn["advantages"])) < 1e-5
    assert abs(steps[0]["teacher/kl_k1"]) < 1e-5
    assert steps[0]["teacher/scored_tokens"] == steps[0]["tokens/generated"]
    assert all(row["teacher/failures"] == 0 for row in steps)
    again = [*("--mode", "train", "--rollouts", str(tmp_path / "run")), *ALONE, *teacher]
    words = options(tmp_path, "again", "--num-steps", "2", *again)
    Run(words, log=tmp_path / "log again").require_success()
    digests = [row["trainer/weights_digest"] for row in steps_of(tmp_path / "again")]
    assert digests == [row["trainer/weights_digest"] for row in steps]


@pytest.mark.parametrize("loss", ["sampled", "topk"])
def test_the_kl_to_the_teacher_falls_and_a_killed_replica_of_it_loses_nothing(
    loss: str, tmp_path: Path
) -> None:
    student = noisy_policy(tmp_path / "student")
    more = ("--policy.checkpoint", str(student), "--teacher.checkpoint", str(POLICY_DIR))
    more += ("--num-steps", "25", "--rollout.groups-per-step", "8", "--rollout.group-size", "8")
    more += ("--teacher.loss", loss, "--generator.replicas", "1", "--teacher.replicas", "2")
    more += ("--generator.start-timeout-s", "600")
    run = Run(options(tmp_path, "run", *ALL, *ALONE, *more), log=tmp_path / "log")
    run.wait_until(lambda: len(steps_of(tmp_path / "run")) >= 5, "the fifth step")
    run.process_of("teacher1-rank0").kill()
    run.require_success()
    require_audit(tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert [row["step"] for row in steps] == list(range(1, 26))
    kl = [row["teacher/kl_k3"] for row in steps]
    print(loss, [round(one, 4) for one in kl], [row["train/reward_mean"] for row in steps])
    assert fmean(kl[-3:]) < kl[0] / 3
    assert sum(row["teacher/failures"] for row in steps) == 1
    assert "teacher1 is lost and is started again" in run.log.read_text()
    for row in steps:
        assert row["tokens/generated"] == row["tokens/trained"] == row["teacher/scored_tokens"]


def test_a_teacher_behind_our_own_endpoint_may_go_and_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    more = ("--endpoint.prompt-logprobs", "--generator.replicas", "1")
    more += ("--generator.max-model-len", "300")
    teacher = serve(folder, POLICY_DIR, *more)
    port = teacher.url.rpartition(":")[2]
    words = ("--num-steps", "4", *ALL, *ALONE, "--generator.replicas", "1")
    words += ("--teacher.url", f"{teacher.url}/v1", "--teacher.loss", "topk")
    run = Run(options(tmp_path, "run", *words), log=tmp_path / "log")
    run.wait_until(lambda: len(steps_of(tmp_path / "run")) >= 1, "the first step")
    teacher.run.kill_all()
    again = tmp_path / "again"
    again.mkdir()
    second = serve(again, POLICY_DIR, *more, "--endpoint.port", port)
    try:
        run.require_success()
    finally:
        second.run.kill_all()
    require_audit(tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert abs(steps[0]["teacher/kl_k1"]) < 1e-5
    assert abs(steps[0]["trainer/kl_teacher"]) < 1e-5
    assert sum(row["teacher/failures"] for row in steps) > 0
    for row in steps:
        assert row["tokens/generated"] == row["tokens/trained"] == row["teacher/scored_tokens"]
