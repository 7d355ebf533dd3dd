"""The ready configurations, so that each can start on a made-up machine: `ready`."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import pytest
import safetensors

from tests.support.config_mutations import with_value
from tests.support.verifiers import needs_verifiers
from torchtitan_rl import configs
from torchtitan_rl.config.machine import MachineFacts
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.environments.mixture import MixtureTask
from torchtitan_rl.experiments.gsm8k.make_file import MakeFile
from torchtitan_rl.experiments.gsm8k.make_file import main as make_file
from torchtitan_rl.experiments.gsm8k.task import Gsm8kTask

LAPTOP = MachineFacts(num_cores=2, memory_bytes=24 << 30, max_open_files=1024)
SIX_GPUS = MachineFacts(cuda_devices=tuple("012345"), num_cores=16, memory_bytes=256 << 30)
NEEDS = {"verifiers_tiny": needs_verifiers}
READY = [
    pytest.param(module.name, marks=NEEDS.get(module.name, ()))
    for module in pkgutil.iter_modules(configs.__path__)
]
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


def ready(name: str, folder: Path) -> tuple[RunConfig, MachineFacts]:
    """A ready configuration that can start in ``folder``, with a stand-in for a model that is not
    shipped, and with few problems, so that they are soon read."""
    config: RunConfig = importlib.import_module(f"torchtitan_rl.configs.{name}").config
    machine = SIX_GPUS if "qwen3" in name else LAPTOP
    if not Path(config.policy.checkpoint).is_dir():
        policy = folder / "policy"
        policy.mkdir()
        (policy / "config.json").write_text(json.dumps(ARCHITECTURE))
        (policy / "tokenizer.json").write_text("{}")
        (policy / "model.safetensors").write_bytes(safetensors.serialize({}))
        config = with_value(config, "policy.checkpoint", str(policy))
    if isinstance(config.task, Gsm8kTask):
        config = with_value(config, "task", gsm8k(folder / "policy"))
    elif isinstance(config.task, MixtureTask):
        tasks = {**config.task.tasks, "gsm8k": gsm8k(folder / "policy")}
        config = with_value(config, "task.tasks", tasks)
    config = with_value(with_value(config, "num_steps", 1), "evaluation.num_problems", 4)
    return with_value(config, "output_dir", folder / "outputs"), machine


def gsm8k(folder: Path) -> Gsm8kTask:
    """With a file that is made instead of the real data."""
    make_file(MakeFile(output=folder / "made.jsonl"))
    files = (str(folder / "made.jsonl"),)
    return Gsm8kTask(train=files, validation=files)
