"""What keeps a run from computing on CUDA devices, before a process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from torchtitan_rl.config import machine, preflight
from torchtitan_rl.config.machine import HostFacts, machine_facts
from torchtitan_rl.config.preflight import CudaDevice, CudaFacts, cuda_errors, probe_cuda
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.config.serve import ServeConfig, prepare_serve
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import ConfigError

GIB = 1 << 30
GPU = CudaDevice(name="A10", capability=(8, 6), free_bytes=22 * GIB, total_bytes=24 * GIB)
BUSY = replace(GPU, free_bytes=6 * GIB)
GOOD = CudaFacts(
    torch="2.13.0",
    built_for="13.0",
    driver="580.95.05",
    driver_cuda="13.0",
    devices=(GPU, GPU, GPU),
    has_compiler=True,
    shared_memory_bytes=GIB,
)
MACHINE = HostFacts(cuda_devices=("0", "1", "2"), num_cores=16, memory_bytes=64 * GIB, cuda=GOOD)
NEEDS: dict[str, Any] = {
    "dtype": "bfloat16",
    "replica_devices": (0, 1),
    "memory_share": 0.85,
    "exchanges": True,
    "locked_bytes": 16 * GIB,
}
FAULTS = [
    (
        {"driver": "570.86.10", "driver_cuda": "12.8", "error": "too old", "devices": ()},
        "CUDA cannot be used: the NVIDIA driver 570.86.10 supports CUDA 12.8, and torch 2.13.0 "
        "needs CUDA 13.0; install a newer driver, at least 580",
    ),
    (
        {"error": "No CUDA GPUs are available", "devices": ()},
        "CUDA cannot be used: No CUDA GPUs are available; look at nvidia-smi and "
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        {"devices": (GPU, replace(GPU, name="T4", capability=(7, 5)))},
        "policy.dtype is bfloat16: cuda:1 (T4) has compute capability 7.5, and bfloat16 needs "
        "8.0; give float32",
    ),
    (
        {"devices": (GPU, replace(GPU, name="V100", capability=(7, 0)))},
        "cuda:1 (V100) has compute capability 7.0, and torch 2.13.0 for CUDA 13.0 needs 7.5; leave "
        "it out of CUDA_VISIBLE_DEVICES",
    ),
    (
        {"devices": (GPU, replace(GPU, free_bytes=1 << 20))},
        "generator.gpu_memory_utilization is 0.85: cuda:1 (A10) has 0.0 of 24.0 GiB free; end what "
        "uses it (nvidia-smi)",
    ),
    (
        {"devices": (GPU, BUSY, BUSY)},  # the last one is the trainer's
        "generator.gpu_memory_utilization is 0.85: cuda:1 (A10) has 6.0 of 24.0 GiB free; end "
        "what uses it (nvidia-smi), or give at most 0.25",
    ),
    (
        {"has_compiler": False},
        "no C compiler, or no headers of Python: Triton compiles its kernels with both; install "
        "gcc and python3-dev",
    ),
    (
        {"shared_memory_bytes": 64 << 20},
        "/dev/shm has 64 MiB free: ranks exchange data through it; in a container, give "
        "--shm-size 16g or --ipc=host",
    ),
    (
        {"locked_bytes": 8 << 20},
        "a process may lock 8 MiB of memory: RDMA locks the weights, 16384 MiB; run ulimit -l "
        "unlimited before the worker starts (in a container, give --ulimit memlock=-1)",
    ),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_each_fault_is_one_error_with_its_fix(fault: dict[str, Any], message: str) -> None:
    assert cuda_errors(GOOD, **NEEDS) == []
    assert cuda_errors(replace(GOOD, **fault), **NEEDS, where="host1: ") == [f"host1: {message}"]


def test_what_a_run_does_not_need_is_no_error() -> None:
    facts = replace(GOOD, shared_memory_bytes=0, locked_bytes=0, devices=(BUSY,))
    assert cuda_errors(facts, dtype="float32") == []


def test_a_run_is_refused_on_a_machine_and_on_hosts_that_cannot_compute(tmp_path: Path) -> None:
    config = replace(TINY, output_dir=tmp_path)
    assert prepare_run(config, MACHINE).plan.device == "cuda"
    faulty = replace(GOOD, devices=(BUSY, GPU, GPU), has_compiler=False)
    with pytest.raises(ConfigError, match="no C compiler") as refused:
        prepare_run(config, replace(MACHINE, cuda=faulty))
    assert len(refused.value.errors) == 2
    launch = replace(
        config.launch,
        attach=("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),
        allow_plain_tcp=True,
        generator_hosts=(1,),
        trainer_hosts=(0,),
    )
    hosts = [
        HostFacts(
            address=address,
            cuda_devices=("0", "1", "2"),
            num_cores=8,
            memory_bytes=16 * GIB,
            cuda=replace(faulty, locked_bytes=locked),
        )
        for address, locked in zip(launch.attach, (0, None), strict=True)
    ]
    with pytest.raises(ConfigError) as refused:
        prepare_run(replace(config, launch=launch), MACHINE, ask_hosts=lambda _: tuple(hosts))
    found = [error.partition(" ")[::2] for error in refused.value.errors]
    assert [(host, text[:20]) for host, text in found] == [
        ("host0:", "no C compiler, or no"),  # the trainer's, so its memory is not an engine's
        ("host0:", "a process may lock 0"),
        ("host1:", "generator.gpu_memory"),
        ("host1:", "no C compiler, or no"),
    ]


def test_a_server_is_refused_on_a_machine_that_cannot_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = replace(MACHINE, cuda=replace(GOOD, has_compiler=False))
    monkeypatch.setattr("torchtitan_rl.config.serve.machine_facts", lambda: faulty)
    with pytest.raises(ConfigError, match="no C compiler"):
        prepare_serve(ServeConfig(model=TINY.policy.checkpoint, log_dir=tmp_path))


def test_cuda_is_started_only_where_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "probe_cuda", lambda: GOOD)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert machine_facts().cuda is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert machine_facts().cuda == GOOD


@pytest.mark.skipif(preflight.DRIVER_FILE.exists(), reason="this machine has an NVIDIA driver")
def test_the_child_says_that_this_machine_has_no_cuda() -> None:
    facts = probe_cuda()
    assert facts.error
    assert (facts.devices, facts.driver) == ((), "")
    assert "CUDA cannot be used" in cuda_errors(facts, dtype="float32")[0]


def test_a_child_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def crash(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, "-c", "import os; os.abort()"], **options)

    monkeypatch.setattr(preflight.subprocess, "run", crash)
    facts = probe_cuda.__wrapped__()
    assert facts.error.startswith("a process that starts it ended with -6")


def test_a_machine_without_limits_of_cgroups_has_all_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_CGROUP_BYTES", "_CGROUP_CORES"):  # as in the root group of cgroups 2
        monkeypatch.setattr(machine, name, ())
    here = machine_facts()
    assert here.memory_bytes == psutil.virtual_memory().total
    assert here.num_cores == len(os.sched_getaffinity(0))
