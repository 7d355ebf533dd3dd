"""vLLM's own options: how they are given, which are refused, and that they reach the engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan_rl.backends.monarch import generator as replica
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.arguments import engine_arguments
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.bounds import field_errors
from torchtitan_rl.commands import generate
from torchtitan_rl.config import vllm_options
from torchtitan_rl.config.loader import load_config, parse_options
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.config.serve import ServeConfig, prepare_serve
from torchtitan_rl.config.vllm_options import OWNED, vllm_option_errors, vllm_run_errors
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.generation.config import GeneratorConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
DRAFT = {"method": "eagle3", "model": "drafts", "num_speculative_tokens": 4}
MACHINE = HostFacts(num_cores=16, memory_bytes=64 << 30)


@pytest.fixture(autouse=True)
def names_and_types_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process with vLLM would check them: see ``tests/real/test_vllm_options.py``."""
    monkeypatch.setattr(vllm_options, "_field_errors", lambda options: [])


def test_options_are_given_as_words_whose_values_are_json_or_text() -> None:
    words = ["enforce_eager=true", "attention_backend=FLASH_ATTN", 'x={"a=b": [1, 2.5, null]}']
    expected = {
        "enforce_eager": True,
        "attention_backend": "FLASH_ATTN",
        "x": {"a=b": [1, 2.5, None]},
    }
    config = load_config(
        Path("alphabet_sort_tiny"), ["--generator.vllm", *words, "--generator.replicas", "3"]
    )
    assert (config.generator.vllm, config.generator.replicas) == (expected, 3)
    served = parse_options(ServeConfig, ["model", "--generator.vllm", *words], prog="serve")
    assert served.generator.vllm == expected
    with pytest.raises(ConfigError, match="'eager': give NAME=VALUE"):
        load_config(Path("alphabet_sort_tiny"), ["--generator.vllm", "eager"])


@pytest.mark.parametrize("value", [float("nan"), {1: "a"}, (1, 2), len])
def test_values_in_a_python_file_have_json_types(value: Any) -> None:
    errors = field_errors(GeneratorConfig(vllm={"x": value}))
    assert "give values of JSON types" in errors["vllm"]


def test_each_field_that_is_set_here_is_refused_by_name() -> None:
    generator = GeneratorConfig(vllm=dict.fromkeys(OWNED) | {"enforce_eager": True})
    errors = vllm_option_errors(generator, is_on_cpu=True)
    assert len(errors) == len(OWNED)
    for name, error in zip(OWNED, errors, strict=True):
        assert error == f"generator.vllm has {name}, which is not passed on: {OWNED[name]}"


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ({"batch_invariant": True}, "generator.batch_invariant is True: vLLM has it only on CUDA"),
        (
            {"vllm": {"speculative_config": {"method": "ngram", "prompt_lookup_max": 3}}},
            "speculative_config has no num_speculative_tokens; give the number of tokens to draft",
        ),
        (
            {"vllm": {"speculative_config": NGRAM | {"rejection_sample_method": "synthetic"}}},
            "speculative_config.rejection_sample_method is synthetic",
        ),
        (
            {"vllm": {"speculative_config": NGRAM | {"draft_model_config": {"model": "evil"}}}},
            "speculative_config.draft_model_config is set by vLLM",
        ),
        (
            {"vllm": {"speculative_config": NGRAM | {"num_speculative_tokens": 10**9}}},
            "speculative_config.num_speculative_tokens is 1000000000: give at most 64",
        ),
        (
            {"vllm": {"speculative_config": DRAFT | {"model": "/no/such/model"}}},
            "speculative_config.model is /no/such/model: there is no such directory",
        ),
    ],
)
def test_what_would_break_the_samples_is_refused(generator: dict[str, Any], message: str) -> None:
    (error,) = vllm_option_errors(GeneratorConfig(**generator), is_on_cpu=True)
    assert message in error


def test_batch_invariance_needs_an_attention_backend_that_has_it() -> None:
    def errors(**options: Any) -> list[str]:
        generator = GeneratorConfig(batch_invariant=True, vllm=options)
        return vllm_option_errors(generator, is_on_cpu=False)

    assert errors() == errors(attention_backend="triton_attn") == []
    (error,) = errors(attention_backend="FLASHINFER")
    assert "attention_backend is FLASHINFER" in error
    assert errors(attention_config={"backend": "FLASHINFER"}) == [error]


@pytest.mark.parametrize(
    ("vllm", "change", "message"),
    [
        ({"quantization": "fp8"}, {}, "has quantization: such weights do not survive the pull"),
        (
            {"speculative_config": NGRAM},
            {"rollout": {"top_p": 0.9}},
            "rollout.sampling.top_p is 0.9",
        ),
        (
            {"speculative_config": DRAFT},
            {"placement": "colocated"},
            "speculative_config.method is eagle3: with placement colocated",
        ),
    ],
)
def test_what_does_not_survive_training_is_refused_in_a_run(
    vllm: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    sampling = replace(TINY.rollout.sampling, **change.pop("rollout", {}))
    config = replace(TINY, rollout=replace(TINY.rollout, sampling=sampling), **change)
    (error,) = vllm_run_errors(replace(config, generator=GeneratorConfig(vllm=vllm)))
    assert message in error


@pytest.mark.parametrize(
    ("vllm", "change"),
    [
        ({"quantization": "fp8"}, {"mode": "generate"}),
        ({"speculative_config": NGRAM}, {"placement": "colocated"}),
        ({"speculative_config": DRAFT}, {}),
    ],
)
def test_what_survives_is_not(vllm: dict[str, Any], change: dict[str, Any]) -> None:
    assert vllm_run_errors(replace(TINY, generator=GeneratorConfig(vllm=vllm), **change)) == []


def prepared_run(tmp_path: Path, generator: GeneratorConfig) -> Any:
    return prepare_run(replace(TINY, output_dir=tmp_path, generator=generator), MACHINE)


def prepared_service(tmp_path: Path, generator: GeneratorConfig) -> Any:
    config = ServeConfig(model=TINY.policy.checkpoint, generator=generator, log_dir=tmp_path)
    return prepare_serve(config)


@pytest.mark.parametrize("prepare", [prepared_run, prepared_service])
def test_a_plan_shows_them_and_refuses_wrong_ones(
    tmp_path: Path, prepare: Callable[[Path, GeneratorConfig], Any]
) -> None:
    generator = replace(TINY.generator, vllm={"enforce_eager": False, "x": {"a": "b"}})
    plan = prepare(tmp_path, generator).describe()
    assert 'vLLM: enforce_eager=false, x={"a": "b"}' in plan.splitlines()
    assert "vLLM" not in prepare(tmp_path, TINY.generator).describe()
    with pytest.raises(ConfigError, match=r"generator\.vllm has seed.*give seed"):
        prepare(tmp_path, replace(generator, vllm={"seed": 1}))


def test_they_reach_the_engine_and_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = GeneratorConfig(vllm={"enforce_eager": False, "speculative_config": NGRAM})
    arguments = engine_arguments(GeneratorSpec(model=Path("policy"), generator=generator))
    assert (arguments["enforce_eager"], arguments["speculative_config"]) == (False, NGRAM)
    assert "VLLM_BATCH_INVARIANT" not in engine_environment(1, "cuda")
    monkeypatch.setattr(os, "environ", {})
    options = [
        "--model",
        "a",
        "--input",
        "b",
        "--output",
        "c",
        "--batch-invariant",
        "--vllm",
        "x=1",
    ]
    parsed = parse_options(generate.GenerateOptions, options, prog="generate")
    assert parsed.generator().vllm == {"x": 1}
    generate._prepare_environment(parsed)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"


def test_a_replicas_processes_are_batch_invariant_from_their_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def spawn(*_: Any, environment: dict[str, str], **__: Any) -> None:
        assert environment["VLLM_BATCH_INVARIANT"] == "1"
        raise ConfigError("seen")

    monkeypatch.setattr(replica, "spawn_processes", spawn)
    spec = GeneratorSpec(model=Path("policy"), generator=GeneratorConfig(batch_invariant=True))
    with pytest.raises(ConfigError, match="seen"):
        asyncio.run(replica.spawn_replica(ProcessGroup(name="r", ranks=1, threads=1), spec))
