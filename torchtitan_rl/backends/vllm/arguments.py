"""Arguments of vLLM's engine for a replica, and advice about them if its memory is too small."""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.adapters import adapter_arguments
from torchtitan_rl.backends.vllm.sampling import GRAMMAR_BACKEND
from torchtitan_rl.config.checks import CPU_BLOCK_TOKENS
from torchtitan_rl.config.model import takes_images

_PROFILED_STEPS = 20


def engine_arguments(spec: GeneratorSpec) -> dict[str, Any]:
    is_cpu, generator = spec.device == "cpu", spec.generator
    args: dict[str, Any] = {
        "model": str(spec.model),
        "tensor_parallel_size": generator.tensor_parallel,
        "dtype": "float32" if is_cpu else spec.dtype,
        "seed": spec.seed,
        "max_model_len": generator.max_model_len,
        "max_num_seqs": generator.running_requests(spec.device),
        "max_num_batched_tokens": generator.step_tokens(spec.device),
        "enable_chunked_prefill": not is_cpu,
        "enable_prefix_caching": generator.enable_prefix_caching,
        "async_scheduling": False,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": is_cpu,
        "disable_log_stats": False,  # the stats have each request's times
        "structured_outputs_config": {"backend": GRAMMAR_BACKEND},
    }
    if spec.reasoning_parser:
        args["structured_outputs_config"]["reasoning_parser"] = spec.reasoning_parser
    if spec.profiled_versions:
        args["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(spec.profile_dir),
            "torch_profiler_with_stack": False,
            "max_iterations": _PROFILED_STEPS,
        }
    if spec.sleeps and not is_cpu:
        args["enable_sleep_mode"] = True
    if takes_images(spec.model):
        args["limit_mm_per_prompt"] = {"image": 1, "video": 0}  # `make_prompt` computes one a time
        # vLLM's cache has two halves, which differ after a request that is refused between them.
        args["mm_processor_cache_gb"] = 0
        # vLLM's model scales colours only if the checkpoint says how, which may be left out.
        args["mm_device_do_normalize"] = False
    args |= adapter_arguments(spec.lora or spec.tenants or spec.adapters)
    if generator.tensor_parallel > 1:
        args["distributed_executor_backend"] = "external_launcher"
    if is_cpu:
        args["kv_cache_memory_bytes"] = generator.kv_cache_bytes
        args["block_size"] = CPU_BLOCK_TOKENS
    else:
        args["gpu_memory_utilization"] = generator.gpu_memory_utilization
    return args | generator.vllm


# Parts of vLLM's messages.
CACHE_IS_TOO_SMALL = ("cache is needed, which is larger than", "No available memory for the cache")
DEVICE_IS_IN_USE = "is less than desired GPU memory utilization"


def memory_advice(error: Exception, spec: GeneratorSpec) -> str:
    """Say what to change if an engine cannot start for lack of memory; "" after another error."""
    generator, message = spec.generator, str(error).partition("\n")[0]
    share = f"gpu_memory_utilization (it is {generator.gpu_memory_utilization})"
    length = f"max_model_len (it is {generator.max_model_len})"
    if DEVICE_IS_IN_USE in message:
        change = f"end other programs on the device, or lower {share}"
    elif any(part in message for part in CACHE_IS_TOO_SMALL):
        raised = f"kv_cache_bytes (it is {generator.kv_cache_bytes})"
        if spec.device == "cuda":
            raised = f"{share} or tensor_parallel (it is {generator.tensor_parallel})"
        change = f"raise {raised}, or lower {length}"
    elif isinstance(error, torch.OutOfMemoryError):
        change = f"lower {share} or max_running_requests, or raise tensor_parallel"
    else:
        return ""
    return f"{spec.name} has too little memory; of the generator's options, {change}: {message}"
