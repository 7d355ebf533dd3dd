"""Checks ``generator.vllm``, the fields of vLLM's ``EngineArgs`` that a user sets.

Fields that this program sets, or on whose default it depends, are refused by name (`OWNED`). Names
and types of the others are checked in a child process, because importing vLLM takes seconds.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import one_line
from torchtitan_rl.generation.config import GeneratorConfig

_CHECK_TIMEOUT_S = 600.0
_REFUSED = {  # what to give instead or the reason -> fields
    "processes are placed by generator.replicas and generator.tensor_parallel": (
        "data_parallel_address data_parallel_backend data_parallel_external_lb "
        "data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank "
        "data_parallel_rpc_port data_parallel_size data_parallel_size_local "
        "data_parallel_start_rank decode_context_parallel_size device_ids "
        "distributed_executor_backend enable_elastic_ep enable_eplb master_addr master_port nnodes "
        "node_rank pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size"
    ),
    "policy and tokenizer are read from policy.checkpoint (the model of serve and generate)": (
        "code_revision config_format download_dir hf_config_path hf_overrides ignore_patterns "
        "load_format model model_class_overrides model_impl model_loader_extra_config "
        "model_weights pt_load_map_location revision skip_tokenizer_init tokenizer tokenizer_mode "
        "tokenizer_revision"
    ),
    "code of a checkpoint is never run": "trust_remote_code",
    "models are found before engines start; set HF_TOKEN": "hf_token",
    "give policy.dtype (dtype of serve); a CPU computes in float32": "dtype",
    "give seed (engine_seed of generate)": "seed",
    "give generator.max_model_len": "max_model_len",
    "give generator.max_running_requests": "max_num_seqs",
    "give generator.enable_prefix_caching": "enable_prefix_caching",
    "give generator.kv_cache_bytes for a CPU, generator.gpu_memory_utilization for CUDA": (
        "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override"
    ),
    "the sizes of blocks and steps are chosen for the device": (
        "block_size enable_chunked_prefill long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive max_num_batched_tokens max_num_scheduled_tokens"
    ),
    "the exact policy version of each token depends on it": (
        "async_scheduling scheduler_cls worker_cls worker_extension_cls"
    ),
    "all ranks of a replica must schedule alike": "scheduling_policy",
    "the router queues requests": "max_num_queued_reqs max_num_queued_tokens",
    "sampling is that of each request; give rollout.sampling": (
        "enable_trace_replay generation_config override_generation_config"
    ),
    "the loss needs the distribution that tokens are sampled from": (
        "diffusion_config enable_batch_sharded_sampling logits_processors logprobs_mode "
        "watermark_config"
    ),
    "a request may ask for up to 20 alternatives": "max_logprobs",
    "the loss replays grammars of xgrammar": "structured_outputs_config",
    "give endpoint.reasoning_parser": "reasoning_parser reasoning_parser_plugin",
    "give endpoint.model_name": "served_model_name",
    "give placement colocated": "enable_sleep_mode",
    "give weight_sync": "weight_transfer_config",
    "copies of the KV cache would outlive a pull of new weights": (
        "ec_transfer_config kv_events_config kv_offloading_backend kv_offloading_size "
        "kv_transfer_config"
    ),
    "give policy.lora (adapters of serve)": (
        "default_mm_loras enable_lora enable_mixed_moe_lora_format enable_moe_shared_loras "
        "enable_tower_connector_lora lora_dtype lora_target_modules max_cpu_loras "
        "max_lora_cls_labels max_lora_rank max_loras"
    ),
    "engines complete token ids and nothing else": (
        "convert enable_prompt_embeds io_processor_plugin pooler_config runner tokens_only"
    ),
    "lost replicas are started again; see generator.max_restarts": (
        "enable_fault_tolerance fault_tolerance_config"
    ),
    "metrics need the times of each request": "disable_log_stats",
    "each replica writes its own log; set VLLM_LOGGING_LEVEL for its level": (
        "aggregate_engine_logging log_config_file log_level logging_config"
    ),
    "give profile.steps and profile.replicas": "profiler_config",
    "give speculative_config": "spec_method spec_model spec_tokens",
}
OWNED = {name: fix for fix, names in _REFUSED.items() for name in names.split()}
"""Fields of ``EngineArgs`` that are refused, each with what to give instead or the reason."""

# vLLM quantizes and packs weights once, when it loads them: a pull would copy unquantized weights
# into the packed ones. Weights in another memory are not shown to survive a pull.
_LOST_AT_A_PULL = (
    *("allow_deprecated_quantization", "quantization", "quantization_config"),
    *("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size"),
    *("offload_num_in_group", "offload_params", "offload_prefetch_step"),
)
_DRAFT_CONFIGS = (  # which vLLM makes; reading them could run a checkpoint's code
    *("target_model_config", "target_parallel_config"),
    *("draft_model_config", "draft_parallel_config"),
)
_BATCH_INVARIANT = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
_MAX_DRAFTED = 64  # tokens in a step, each of which needs room in the step's batch
_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")  # methods that draft without a model


def vllm_option_errors(generator: GeneratorConfig, *, is_on_cpu: bool) -> list[str]:
    """One message per field of ``generator.vllm`` that cannot be passed on, and an error if
    ``generator.batch_invariant`` is not possible with the others or on this device."""
    options, errors = generator.vllm, []
    for name in options:
        if name in OWNED:
            errors.append(f"generator.vllm has {name}, which is not passed on: {OWNED[name]}")
    errors += [
        f"generator.vllm: speculative_config.{name} is set by vLLM; leave it out"
        for name in _DRAFT_CONFIGS
        if name in _speculative(generator)
    ]
    if options and not errors:
        errors = [f"generator.vllm: {error}" for error in _field_errors(json.dumps(options))]
    speculative = _speculative(generator)
    # The configuration of a draft model may have the number.
    has_number = {"num_speculative_tokens", "model"} & speculative.keys()
    if speculative and not has_number and speculative.get("method") != "suffix":
        errors.append(
            "generator.vllm: speculative_config has no num_speculative_tokens; give the number of "
            "tokens to draft in a step, such as 4"
        )
    number = speculative.get("num_speculative_tokens")
    if isinstance(number, int) and number > _MAX_DRAFTED:
        errors.append(
            f"generator.vllm: speculative_config.num_speculative_tokens is {number}: give at most "
            f"{_MAX_DRAFTED}"
        )
    model = speculative.get("model")
    if isinstance(model, str) and model.startswith(("/", "./", "../")) and not Path(model).is_dir():
        errors.append(
            f"generator.vllm: speculative_config.model is {model}: there is no such directory; "
            "give a Hugging Face directory, or the name of a model on the hub"
        )
    if speculative.get("rejection_sample_method") == "synthetic":
        errors.append(
            "generator.vllm: speculative_config.rejection_sample_method is synthetic: it accepts "
            "tokens that the policy did not sample; give standard or block"
        )
    if generator.batch_invariant and is_on_cpu:
        errors.append(
            "generator.batch_invariant is True: vLLM has it only on CUDA; leave it out on a CPU"
        )
    attention = options.get("attention_config")
    inner = attention.get("backend") if isinstance(attention, dict) else None
    backend = options.get("attention_backend") or inner or _BATCH_INVARIANT[0]
    if generator.batch_invariant and str(backend).upper() not in _BATCH_INVARIANT:
        errors.append(
            f"generator.vllm: attention_backend is {backend}: with generator.batch_invariant give "
            f"{', '.join(_BATCH_INVARIANT)}, or leave it to vLLM"
        )
    return errors


def vllm_run_errors(config: RunConfig) -> list[str]:
    """Errors in ``generator.vllm`` that concern a run: its weights change, and its samples are
    trained on. One message per error."""
    options, sampling = config.generator.vllm, config.rollout.sampling
    errors = []
    if config.mode == "both":
        errors = [
            f"generator.vllm has {name}: such weights do not survive the pull of a new version; "
            "leave it out (serve, eval, generate and mode generate take it)"
            for name in _LOST_AT_A_PULL
            if name in options
        ]
    speculative = _speculative(config.generator)
    if not speculative:
        return errors
    for name, whole in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if (value := getattr(sampling, name)) != whole:
            errors.append(
                f"rollout.sampling.{name} is {value}: with speculative decoding the tokens that it "
                f"keeps are not recorded, so nothing could be trained on; give {whole}"
            )
    method = speculative.get("method")
    if config.is_colocated and method not in _WITHOUT_WEIGHTS:
        errors.append(
            f"generator.vllm: speculative_config.method is {method}: with placement colocated a "
            "sleep frees the weights of a draft model, and no pull restores them; give "
            f"{', '.join(_WITHOUT_WEIGHTS)}"
        )
    return errors


def _speculative(generator: GeneratorConfig) -> dict[str, object]:
    config = generator.vllm.get("speculative_config")
    return config if isinstance(config, dict) else {}


@functools.cache
def _field_errors(options: str) -> list[str]:
    command = [sys.executable, "-P", "-m", "torchtitan_rl.backends.vllm.field_types"]
    try:
        done = subprocess.run(
            command,
            input=options,
            capture_output=True,
            text=True,
            check=True,
            timeout=_CHECK_TIMEOUT_S,
        )
    except subprocess.SubprocessError as error:
        lines = str(getattr(error, "stderr", None) or one_line(error)).splitlines()
        return [f"vLLM could not be asked about it ({lines[-1]})"]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
