"""What vLLM's engine is given of a replica's specification."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
import vllm

from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.arguments import (
    CACHE_IS_TOO_SMALL,
    DEVICE_IS_IN_USE,
    engine_arguments,
    memory_advice,
)
from torchtitan_rl.generation.config import GeneratorConfig

GENERATOR = GeneratorConfig(
    tensor_parallel=2,
    max_model_len=300,
    max_running_requests=7,
    kv_cache_bytes=1 << 20,
    gpu_memory_utilization=0.5,
    enable_prefix_caching=False,
)
COMMON = {
    "model": "policy",
    "tensor_parallel_size": 2,
    "seed": 3,
    "max_model_len": 300,
    "max_num_seqs": 7,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": False,
    "structured_outputs_config": {"backend": "xgrammar"},
    "distributed_executor_backend": "external_launcher",
}


def test_a_cpu_engine_computes_in_float32_and_has_a_cache_of_small_blocks() -> None:
    spec = GeneratorSpec(model=Path("policy"), generator=GENERATOR, seed=3, sleeps=True)
    assert engine_arguments(spec) == COMMON | {
        "dtype": "float32",
        "max_num_batched_tokens": 4096,
        "enable_chunked_prefill": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 20,
        "block_size": 32,
    }


def test_a_cuda_engine_takes_its_share_of_the_memory_and_gives_it_back_asleep() -> None:
    spec = GeneratorSpec(
        model=Path("policy"),
        generator=GENERATOR,
        seed=3,
        device="cuda",
        sleeps=True,
        reasoning_parser="qwen3",
    )
    assert engine_arguments(spec) == COMMON | {
        "dtype": "bfloat16",
        "max_num_batched_tokens": 16384,
        "enable_chunked_prefill": True,
        "enforce_eager": False,
        "gpu_memory_utilization": 0.5,
        "enable_sleep_mode": True,
        "structured_outputs_config": {"backend": "xgrammar", "reasoning_parser": "qwen3"},
    }


def test_sizes_that_are_not_given_depend_on_the_device() -> None:
    long = GeneratorConfig(max_model_len=32768)
    sizes = {}
    for device in ("cpu", "cuda"):
        found = engine_arguments(GeneratorSpec(model=Path("policy"), generator=long, device=device))
        sizes[device] = (found["max_num_seqs"], found["max_num_batched_tokens"])
    # On a CPU a step has room for the longest prompt, on CUDA for a chunk of it.
    assert sizes == {"cpu": (128, 32768), "cuda": (256, 16384)}


IN_USE = f"Free memory on device cuda:0 (1/80 GiB) on startup {DEVICE_IS_IN_USE} (0.5, 40 GiB)."
NO_CACHE = f"{CACHE_IS_TOO_SMALL[1]} blocks. Try"


@pytest.mark.parametrize(
    ("device", "error", "change"),
    [
        ("cuda", ValueError(IN_USE), "end other programs on the device, or lower gpu_memory_util"),
        (
            "cuda",
            ValueError(NO_CACHE),
            "raise gpu_memory_utilization (it is 0.5) or tensor_parallel (it is 2), or lower max_m",
        ),
        ("cpu", ValueError(NO_CACHE), "raise kv_cache_bytes (it is 1048576), or lower max_model_"),
        ("cuda", torch.OutOfMemoryError("CUDA"), "lower gpu_memory_utilization (it is 0.5) or ma"),
    ],
)
def test_an_engine_without_memory_names_the_options_to_change(
    device: Literal["cpu", "cuda"], error: Exception, change: str
) -> None:
    spec = GeneratorSpec(model=Path("policy"), name="replica1", device=device, generator=GENERATOR)
    advice = memory_advice(error, spec)
    assert advice.startswith(
        "replica1 has too little memory; of the generator's options, " + change
    )
    assert advice.endswith(str(error))
    assert memory_advice(ValueError("no such model"), spec) == ""


def test_the_messages_are_those_of_the_installed_vllm() -> None:
    root = Path(vllm.__file__).parent / "v1"
    source = (root / "core" / "kv_cache_utils.py").read_text()
    assert all(part in source.replace('"\n            f"', "") for part in CACHE_IS_TOO_SMALL)
    assert DEVICE_IS_IN_USE in (root / "worker" / "utils.py").read_text()
