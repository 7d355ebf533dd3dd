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


@pytest.mark.parametrize(
    ("devices", "has_driver", "cuda", "level", "words"),
    [
        ({"cuda:0 H200": 139 << 30}, True, "13.0", "ok", "1 device: cuda:0 H200 139 GiB"),
        ({}, True, None, "error", "make clean setup ACCELERATOR=cuda"),
        ({}, True, "13.0", "error", "CUDA_VISIBLE_DEVICES"),
        ({}, False, "13.0", "note", "make clean setup"),
        ({}, False, None, "ok", "float32"),
    ],
)
def test_devices_that_torch_cannot_use_are_named(devices, has_driver, cuda, level, words):
    (finding,) = check_devices(devices, has_driver=has_driver, cuda=cuda)
    assert finding.level == level
    assert words in str(finding)


def test_a_compiler_is_needed_on_cuda():
    assert check_compiler(has_compiler=False, needs_one=True).level == "error"
    assert check_compiler(has_compiler=False, needs_one=False).level == "note"
    assert check_compiler(has_compiler=True, needs_one=True).level == "ok"


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
