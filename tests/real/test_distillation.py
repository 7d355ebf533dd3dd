"""Whole runs with a teacher: on replicas, one of which is killed; in the trainer; behind the URL of
our own server and of vLLM's."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.real.models import hf_logprob_rows
from tests.real.runs import TIMEOUT_S, Run, options, read_metrics, read_rollouts, require_audit
from tests.real.served import serve
from tests.real.test_replay import replay
from torchtitan_rl.distillation.server import ServedTeacher, check_server
from torchtitan_rl.errors import TeacherError
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.launch.interfaces import free_port
from torchtitan_rl.rollout.rendering import load_tokenizer
from torchtitan_rl.types import TokenScores

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


def test_the_kl_to_a_teacher_in_the_trainer_falls_also_after_a_resume(tmp_path: Path) -> None:
    """And its steps can be taken again, from the recorded rollouts."""
    student = noisy_policy(tmp_path / "student")
    more = ("--policy.checkpoint", str(student), "--teacher.checkpoint", str(POLICY_DIR))
    more += ("--teacher.loss", "full", *ALL, *ALONE, "--generator.replicas", "1")
    more += ("--rollout.groups-per-step", "8", "--rollout.group-size", "8")
    more += ("--trainer.optimizer.decay-steps", "0")  # which depends on the number of steps
    words = options(tmp_path, "run", *more, "--num-steps", "25", "--checkpoint.every", "5")
    run = Run(words, log=tmp_path / "log")
    run.wait_until(lambda: len(steps_of(tmp_path / "run")) >= 8, "the eighth step")
    run.kill_all()
    Run([*words, "--checkpoint.resume"], log=tmp_path / "log resumed").require_success()
    require_audit(tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert [row["step"] for row in steps] == list(range(1, 26))
    kl = [row["trainer/kl_teacher"] for row in steps]
    print([round(one, 4) for one in kl], [row["train/reward_mean"] for row in steps])
    assert fmean(kl[-3:]) < kl[0] / 3
    assert all(row["tokens/generated"] == row["tokens/trained"] for row in steps)
    again = (*more, "--mode", "train", "--rollouts", str(tmp_path / "run"), "--num-steps", "2")
    Run(options(tmp_path, "again", *again), log=tmp_path / "log again").require_success()
    digests = [row["trainer/weights_digest"] for row in steps_of(tmp_path / "again")]
    assert digests == [row["trainer/weights_digest"] for row in steps[:2]]
    exit_code, said = replay(tmp_path, tmp_path / "run", "--step", "22")
    assert exit_code == 0, said
    assert said.count("the weights equal those of the run") == 2  # steps 21 and 22


@contextmanager
def vllm_serve(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """``vllm serve`` of the embedded policy. It needs the name of the package for CUDA, which the
    one for CPUs does not have."""
    named = folder / "named" / "vllm-0+cpu.dist-info"
    named.mkdir(parents=True, exist_ok=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    words = ("--dtype", "float32", "--max-model-len", "300", "--enforce-eager")
    words += ("--host", "127.0.0.1", "--port", str(port))
    log = folder / "vllm.log"
    with log.open("a") as output:
        server = subprocess.Popen(
            [str(Path(sys.executable).with_name("vllm")), "serve", str(POLICY_DIR), *words],
            env=os.environ
            | {"PYTHONPATH": str(named.parent), "OMP_NUM_THREADS": "1"}
            | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_healthy(port):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield server
    finally:
        kill_session(server)


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def kill_session(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def scored(url: str, token_ids: tuple[int, ...], num_top: int) -> TokenScores:
    async def ask() -> TokenScores:
        teacher = ServedTeacher(
            url, model=str(POLICY_DIR), timeout_s=60.0, say=print, num_top=num_top
        )
        try:
            return await teacher.score("r", token_ids)
        finally:
            await teacher.close()

    return asyncio.run(ask())


def test_vllms_own_server_scores_as_transformers_do_or_is_refused(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    tokenizer = load_tokenizer(POLICY_DIR)
    with vllm_serve(tmp_path, port):
        check: Any = partial(check_server, url, vocab_size=384, decode=tokenizer.decode)
        assert check(model="", max_tokens=299, num_top=8) == str(POLICY_DIR)
        for words, cause in (
            ({"num_top": 64}, "vllm serve with --max-logprobs 64"),
            ({"max_tokens": 300}, "--max-model-len 301 or more"),
            ({"model": "other"}, "--served-model-name.* by teacher.model"),
            ({"vocab_size": 1000}, "HTTP 400: .*out of vocabulary"),
        ):
            with pytest.raises(TeacherError, match=cause):
                check(**{"model": "", "max_tokens": 299, **words})
        token_ids = tuple(np.random.default_rng(0).integers(0, 380, 250).tolist())
        found = scored(url, token_ids, 8)
        assert scored(url, token_ids, 0).logprobs == found.logprobs
    rows_LV = hf_logprob_rows(POLICY_DIR, token_ids)[:-1]
    expected_L = np.take_along_axis(rows_LV, np.array(token_ids)[1:, None], 1)[:, 0]
    np.testing.assert_allclose(found.logprobs, expected_L, atol=1e-5, rtol=1e-6)
    top_LK = np.frombuffer(found.top_logprobs, "<f4").reshape(-1, 8)
    np.testing.assert_allclose(top_LK, -np.sort(-rows_LV)[:, :8], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("loss", ["sampled", "topk"])
def test_vllms_own_server_may_go_and_come_back(loss: str, tmp_path: Path) -> None:
    port = free_port()
    words = ("--num-steps", "4", *ALL, *ALONE, "--generator.replicas", "1")
    words += ("--teacher.url", f"http://127.0.0.1:{port}/v1", "--teacher.loss", loss)
    with vllm_serve(tmp_path, port) as server:
        run = Run(options(tmp_path, "run", *words), log=tmp_path / "log")
        run.wait_until(lambda: len(steps_of(tmp_path / "run")) >= 1, "the first step")
        kill_session(server)
    with vllm_serve(tmp_path, port):
        run.require_success()
    require_audit(tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert abs(steps[0]["teacher/kl_k1"]) < 1e-5
    assert sum(row["teacher/failures"] for row in steps) > 0
    for row in steps:
        assert row["tokens/generated"] == row["tokens/trained"] == row["teacher/scored_tokens"]
