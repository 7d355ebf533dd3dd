"""The ready configurations, so that each can start on a made-up machine: `ready`."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors

from tests.support.config_mutations import with_value
from tests.support.retrievers import start_retriever
from tests.support.verifiers import needs_verifiers
from torchtitan_rl import DataTask, MixtureTask, Task, configs
from torchtitan_rl.config.loader import ready_configs
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.experiments.calculator_agent.dataset import make_problem
from torchtitan_rl.experiments.code_tests.task import CodeTestsTask
from torchtitan_rl.experiments.gsm8k.make_file import row
from torchtitan_rl.experiments.gsm8k.task import SIZES, Gsm8kTask
from torchtitan_rl.experiments.search_r1.task import SearchR1Task

LAPTOP = HostFacts(num_cores=2, memory_bytes=24 << 30, max_open_files=1024)
NUM_GPUS = {
    "alphabet_sort_qwen3_0_6b": 6,
    "gsm8k_qwen3_0_6b": 1,
    "gsm8k_qwen3_8b_lora": 1,
}  # of the others 8
NEEDS = {"verifiers_tiny": needs_verifiers}
READY = [
    pytest.param(name, marks=NEEDS.get(name, ()))
    for name in (module.name for module in pkgutil.iter_modules(configs.__path__))
    if not name.startswith(("sft_", "dpo_"))
]
SUPERVISED = [*ready_configs("sft"), *ready_configs("dpo")]
ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}
QWEN3 = {  # hidden size, intermediate size, layers, heads
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32),
    "Qwen/Qwen3-4B-Base": (2560, 9728, 36, 32),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32),
    "Qwen/Qwen3-8B-Base": (4096, 12288, 36, 32),
}
QWEN3_30B_A3B = {  # with 8 of 48 layers: the disk must have room for its versions
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}


def ready(name: str, folder: Path) -> tuple[RunConfig, HostFacts]:
    """A ready configuration that can start in ``folder``, with a stand-in for a model that is not
    shipped, and with few problems, so that they are soon read."""
    config: RunConfig = importlib.import_module(f"torchtitan_rl.configs.{name}").config
    machine = gpus(NUM_GPUS.get(name, 8)) if "qwen3" in name else LAPTOP
    if not Path(config.policy.checkpoint).is_dir():
        policy = folder / "policy"
        policy.mkdir()
        (policy / "config.json").write_text(json.dumps(architecture(config.policy.checkpoint)))
        (policy / "tokenizer.json").write_text("{}")
        (policy / "model.safetensors").write_bytes(safetensors.serialize({}))
        config = with_value(config, "policy.checkpoint", str(policy))
    if config.teacher.checkpoint and not Path(config.teacher.checkpoint).is_dir():
        config = with_value(config, "teacher.checkpoint", config.policy.checkpoint)
    if isinstance(config.task, MixtureTask):
        made = with_made_data(config.task.tasks["gsm8k"], folder)
        config = with_value(config, "task.tasks", {**config.task.tasks, "gsm8k": made})
    else:
        config = with_value(config, "task", with_made_data(config.task, folder))
    config = with_value(with_value(config, "num_steps", 1), "evaluation.num_problems", 4)
    return with_value(config, "output_dir", folder / "outputs"), machine


def gpus(number: int) -> HostFacts:
    devices = tuple(map(str, range(number)))
    return HostFacts(
        cuda_devices=devices,
        device_bytes=24 << 30 if number == 1 else 80 * 10**9,
        num_cores=16,
        memory_bytes=256 << 30,
    )


def architecture(checkpoint: str) -> dict[str, Any]:
    if checkpoint == "Qwen/Qwen3-30B-A3B":
        return architecture("Qwen/Qwen3-8B-Base") | QWEN3_30B_A3B
    if checkpoint not in QWEN3:
        return ARCHITECTURE
    hidden, intermediate, layers, heads = QWEN3[checkpoint]
    return ARCHITECTURE | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": hidden < 4096,
    }


def with_made_data(task: Task, folder: Path) -> Task:
    """The task with a file that is made instead of the real data, where that is not shipped, and
    with a retriever that runs."""
    if type(task) not in MADE or Path(task.train[0]).is_file():
        return task
    files = (str(made_file(type(task), folder / "policy" / "made.jsonl")),)
    task = replace(task, train=files, validation=files)
    return replace(task, retriever=made_retriever()) if isinstance(task, SearchR1Task) else task


def made_file(kind: type, file: Path) -> Path:
    rows = (json.dumps(MADE[kind](number)) for number in range(256))
    file.write_text("".join(f"{row}\n" for row in rows))
    return file


def toy(name: str, folder: Path) -> list[str]:
    """The words that make a command use a configuration of a real task at toy size on a CPU, with
    a policy of the package and made data."""
    policy, *more = TOYS[name]
    task = importlib.import_module(f"torchtitan_rl.configs.{name}").config.task
    file = str(made_file(type(task), folder / "made.jsonl"))
    data = ["--task.train", file, "--task.validation", file]
    if isinstance(task, SearchR1Task):
        data += ["--task.retriever", made_retriever()]
    return [name, "--policy.checkpoint", f"package:{policy}", *data, *SMALL_SHAPE, *more]


def _gsm8k(number: int) -> dict[str, Any]:
    return row(make_problem("train", number, SIZES).data)


def _verl(number: int) -> dict[str, Any]:
    made = _gsm8k(number)
    prompt = [{"role": "user", "content": made["question"]}]
    return {"prompt": prompt, "reward_model": {"ground_truth": made["answer"].split()[-1]}}


def _taco(number: int) -> dict[str, Any]:
    tests = {"inputs": ["1\n", "2\n"], "outputs": [f"{1 + number}\n", f"{2 + number}\n"]}
    return {"problem": f"Read a number and add {number}.", "tests": json.dumps(tests)}


def _nq(number: int) -> dict[str, Any]:
    person, town = PEOPLE[number % len(PEOPLE)]
    return {"question": f"In which town does {person} live?", "golden_answers": [town]}


SMALL_SHAPE = (
    "--rollout.groups-per-step", "4",
    "--rollout.group-size", "4",
    "--rollout.max-total-tokens", "1024",
    "--rollout.sampling.max-tokens-per-turn", "48",
    "--generator.replicas", "1",
    "--generator.max-model-len", "1024",
    "--generator.max-running-requests", "16",
    "--trainer.data-parallel-shard", "1",
    "--trainer.max-episode-tokens", "1024",
    "--trainer.max-tokens-per-microbatch", "4096",
    "--evaluation.num-problems", "4",
)  # fmt: skip
TOYS = {  # the policy of the package, and options for it
    "gsm8k_qwen3_0_6b": ("gsm8k",),
    "gsm8k_qwen3_4b": ("gsm8k",),
    "gsm8k_qwen3_8b_lora": ("gsm8k",),
    "dapo_math_qwen3_8b": (
        *("gsm8k", "--task.answer-pattern", r"####\s*(\S.*)"),
        *("--rollout.overlong.buffer-tokens", "8"),
    ),
    "search_r1_qwen3_4b": (
        *("search", "--task.thinking", "keep"),
        *("--task.prompt", "{question}"),  # the policy knows only such questions
    ),
    "code_qwen3_4b": ("code_interpreter",),
}
PEOPLE = (("Boris Weaver", "Harlow"), ("Irene Stone", "Kelso"), ("Hugo Wood", "Norby"))
MADE: Mapping[type, Callable[[int], dict[str, Any]]] = {
    Gsm8kTask: _gsm8k,
    DataTask: _verl,
    CodeTestsTask: _taco,
    SearchR1Task: _nq,
}
"""Row ``number`` of a file in the format of a task's data."""


@functools.cache
def made_retriever() -> str:
    """The address of a retriever that knows where the `PEOPLE` live, in a thread."""
    texts = [f"{person} lives in {town}." for person, town in PEOPLE]
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return start_retriever(folder, texts)
