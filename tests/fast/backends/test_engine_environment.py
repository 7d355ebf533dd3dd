"""The environment variables, deadlines and limits of engines on CUDA."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams, envs
from vllm.v1.worker.gpu.sample import logit_bias

from torchtitan_rl.backends.monarch import endpoint as monarch_endpoint
from torchtitan_rl.backends.specs import EndpointSpec, GeneratorSpec
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.backends.vllm.sampling import MAX_TOKENS_OF, check_numbers_of_tokens
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.serving.config import EndpointConfig, Keys


def test_no_step_on_cuda_compiles_flashinfers_sampler_unless_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert engine_environment(1, "cuda")["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in engine_environment(1, "cpu")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    assert engine_environment(1, "cuda")["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


def test_a_replica_on_cuda_says_what_it_does_and_has_more_time_to_start() -> None:
    assert engine_environment(1, "cuda")["VLLM_LOGGING_LEVEL"] == "INFO"
    assert engine_environment(1, "cpu")["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert GeneratorSpec(model=Path()).start_timeout_s == 300.0
    assert GeneratorSpec(model=Path(), device="cuda").start_timeout_s == 900.0
    given = GeneratorConfig(start_timeout_s=7.0)
    assert GeneratorSpec(model=Path(), device="cuda", generator=given).start_timeout_s == 7.0


@pytest.mark.parametrize(("device", "mask"), [("cuda", ""), ("cpu", None)])
def test_the_endpoints_process_sees_no_device(
    device: Any, mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, str] = {}

    async def spawn(group: ProcessGroup, *, environment: dict[str, str], **_: Any) -> None:
        asked.update(environment)
        raise ProcessLookupError

    monkeypatch.setattr(monarch_endpoint, "spawn_processes", spawn)
    spec = EndpointSpec(
        model=Path(),
        device=device,
        dtype="bfloat16",
        max_model_len=8,
        generation_config="vllm",
        endpoint=EndpointConfig(),
        keys=Keys(),
        log_dir=Path(),
    )
    group = ProcessGroup(name="endpoint", ranks=1, threads=1)
    with pytest.raises(ProcessLookupError):
        asyncio.run(monarch_endpoint.MonarchEndpoint.spawn(group, spec))
    assert asked.get("CUDA_VISIBLE_DEVICES") == mask


def params(**options: Any) -> SamplingParams:
    made = SamplingParams(**options)
    made._bad_words_token_ids = [[word] * 8 for word in range(len(options.get("bad_words", ())))]
    made.update_from_generation_config({"eos_token_id": [5001, 5002]}, 5001)
    return made


@pytest.mark.parametrize(
    ("name", "at_most", "too_many"),
    [
        ("allowed_token_ids", [*range(1024)], [*range(1025)]),
        ("logit_bias", dict.fromkeys(range(1024), 1.0), dict.fromkeys(range(1025), 1.0)),
        ("bad_words", ["word"] * 128, ["word"] * 129),  # of 8 tokens each
        ("stop_token_ids", [*range(126)], [*range(127)]),  # and two of the model
    ],
)
def test_what_a_step_on_cuda_would_refuse_is_refused_at_admission(
    name: str, at_most: Any, too_many: Any
) -> None:
    check_numbers_of_tokens(params(**{name: at_most}))
    with pytest.raises(ValueError, match=rf"{name} has \d+ tokens: give at most"):
        check_numbers_of_tokens(params(**{name: too_many}))


def test_the_limits_are_those_of_the_installed_vllm() -> None:
    assert MAX_TOKENS_OF == {
        "allowed_token_ids": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "logit_bias": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        "bad_words": envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
        "stop_token_ids": logit_bias.MAX_NUM_STOP_TOKEN_IDS,
    }
