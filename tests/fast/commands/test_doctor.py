"""``torchtitan-rl doctor`` on machines with one fault each, and on this one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_rl.commands.cli import main
from torchtitan_rl.commands.doctor import (
    Speed,
    check_compiler,
    check_devices,
    check_isolation,
    check_requirements,
    describe_step,
    estimate_step,
)
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.config.preflight import CudaDevice, CudaFacts
from torchtitan_rl.config.prepare import prepare_run

NEEDED = ["torch==2.13.0", "numpy>=2.0", 'vllm==0.32.0; extra == "cuda"', 'x>=1; extra == "dev"']


@pytest.mark.parametrize(
    ("installed", "errors"),
    [
        ({"torch": "2.13.0", "numpy": "2.4", "vllm": "0.32.0"}, []),
        ({"torch": "2.13.0", "vllm": "0.32.0"}, ["error: numpy is not installed; run make setup"]),
        ({"torch": "2.13.0", "numpy": "2.4"}, ["error: vllm is not installed; run make setup"]),
        (
            {"torch": "2.12.1", "numpy": "2.4", "vllm": "0.33.0"},
            [
                "error: torch 2.12.1 is installed, and ==2.13.0 is needed; run make setup",
                "error: vllm 0.33.0 is installed, and ==0.32.0 is needed; run make setup",
            ],
        ),
    ],
)
def test_versions_that_do_not_fit_together_are_named(installed, errors):
    *found, versions = map(str, check_requirements(NEEDED, installed))
    assert found == errors
    assert f"torch {installed['torch']}" in versions


GPU = CudaDevice(name="H200", capability=(9, 0), free_bytes=138 << 30, total_bytes=139 << 30)
GOOD = CudaFacts(
    torch="2.13.0",
    built_for="13.0",
    driver="580.95.05",
    driver_cuda="13.0",
    devices=(GPU,),
    has_compiler=True,
    shared_memory_bytes=1 << 30,
)
OLD_DRIVER = replace(GOOD, devices=(), driver="570.86.10", driver_cuda="12.8", error="too old")


@pytest.mark.parametrize(
    ("facts", "built_for", "expected"),
    [
        (GOOD, "13.0", "ok: CUDA 13.0, driver 580.95.05, 1 device: cuda:0 H200 139 GiB, capab"),
        (OLD_DRIVER, "13.0", "error: CUDA cannot be used: the NVIDIA driver 570.86.10 supports"),
        (replace(OLD_DRIVER, built_for=""), None, "run make setup ACCELERATOR=cuda"),
        (None, "13.0", "note: torch for CUDA 13.0 on a machine without an NVIDIA driver; for a"),
        (None, None, "ok: no CUDA device: all processes compute on the CPU, in float32"),
    ],
)
def test_devices_that_torch_cannot_use_are_named(facts, built_for, expected):
    (finding,) = check_devices(facts, built_for=built_for)
    assert expected in str(finding)


def test_a_compiler_is_needed_on_cuda():
    found = [*check_devices(replace(GOOD, has_compiler=False), built_for="13.0")]
    assert [one.level for one in found] == ["error", "ok"]
    assert found[0].fix == "install gcc and python3-dev"
    assert check_compiler(False).level == "note"
    assert check_compiler(True).level == "ok"


def test_the_strongest_isolation_that_the_machine_allows_is_named():
    def refusing(*kinds):
        return lambda kind: [f"{kind}: not here"] if kind in kinds else []

    assert str(check_isolation(refusing())) == "ok: sandbox isolation: namespaces"
    weaker = check_isolation(refusing("namespaces"))
    assert weaker.level == "note"
    assert "only landlock" in weaker.what
    assert weaker.fix == "namespaces: not here"
    assert "only limits" in check_isolation(refusing("namespaces", "landlock")).what
    assert check_isolation(refusing("namespaces", "landlock", "limits")).level == "error"


def test_this_machine_can_run_the_ready_configuration(capsys, tmp_path):
    words = ["doctor", "alphabet_sort_tiny", "--output-dir", str(tmp_path / "new")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"ok: Python {sys.version.split()[0]}, torch " in printed.out
    assert "ok: task: AlphabetSortTask" in printed.out
    assert f"{tmp_path} has " in printed.out
    assert not (tmp_path / "new").exists()


def test_every_error_of_a_configuration_is_a_finding(capsys):
    words = ["doctor", "alphabet_sort_tiny", "--generator.replicas", "4000"]
    assert main(words) == 1
    assert "error: generator.replicas is 4000: " in capsys.readouterr().err


def test_a_configuration_that_does_not_exist_is_a_wrong_command(capsys):
    assert main(["doctor", "no_such_run"]) == 2
    assert "no_such_run" in capsys.readouterr().err


def test_options_without_a_configuration_are_refused(capsys):
    assert main(["doctor", "--generator.replicas", "2"]) == 2
    assert "CONFIG is missing before --generator.replicas" in capsys.readouterr().err


def test_the_time_of_a_step_is_estimated_from_weights_and_tokens(tmp_path):
    """128 rollouts of at most 256 tokens, 72 of them sampled; two replicas, one trainer."""
    config = load_config(Path("alphabet_sort_tiny"), ["--output-dir", str(tmp_path)])
    prepared = replace(prepare_run(config), num_weights=10**9)
    rollout = config.rollout
    sampled = min(rollout.max_turns * rollout.sampling.max_tokens_per_turn, 256)
    fast_memory = estimate_step(prepared, Speed(flops=1e12, bytes_read=1e15))
    assert fast_memory.training_s == pytest.approx(6 * 1e9 * 128 * 256 / 1e12)
    assert fast_memory.generation_s == pytest.approx(2 * 1e9 * 128 * 256 / 2 / 1e12)
    slow_memory = estimate_step(prepared, Speed(flops=1e12, bytes_read=1e9))
    assert slow_memory.generation_s == pytest.approx(sampled * 4e9 / 1e9)
    assert "(generation 32.8 s, training 3:17)" in describe_step(fast_memory)
