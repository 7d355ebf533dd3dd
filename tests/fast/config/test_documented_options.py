"""The options that the documentation names exist; their texts are those of ``--help`` alone."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.config_mutations import with_value
from tests.support.documentation import PAGES
from torchtitan_rl.commands.chaos import ChaosOptions
from torchtitan_rl.commands.data import PreviewConfig
from torchtitan_rl.commands.env import EnvCheckConfig
from torchtitan_rl.commands.generate import GenerateOptions
from torchtitan_rl.commands.keys import KeysConfig
from torchtitan_rl.commands.launch_script import LaunchScriptOptions
from torchtitan_rl.commands.new import NewTaskConfig
from torchtitan_rl.commands.replay import ReplayConfig
from torchtitan_rl.commands.report import ReportOptions
from torchtitan_rl.commands.view import ViewOptions
from torchtitan_rl.commands.worker import WorkerOptions
from torchtitan_rl.config.evaluate import EvalConfig
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.config.problems import evaluation_problems
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.config.serve import ServeConfig
from torchtitan_rl.configs.dpo_alphabet_sort_tiny import config as DPO
from torchtitan_rl.configs.sft_alphabet_sort_tiny import config as SFT
from torchtitan_rl.launch.scripts import (
    ComposeOptions,
    KubernetesOptions,
    SlurmOptions,
    SshOptions,
)

ROOT = Path(__file__).parents[3]
OPTIONS_OF_KINDS = (SlurmOptions, KubernetesOptions, SshOptions, ComposeOptions)
FLAGS = {"--devices", "--dry-run", "--json", "--help", "--no-pin-cores", "--page"}
FLAGS |= {"--mtbf-hours", "--replicas"}  # of simulate
MODULES = {
    "monarch.job",
    "monarch.job.ProcessJob",
    "monarch._src.actor.bootstrap_main",
}  # of Monarch
NOT_OURS = re.compile(
    r"git |pip |vllm serve |pytest|py-spy|torchrun|-m (tests|benchmarks)|python3? -m|sbatch "
    r"|kubectl |docker "
)


@cache
def fields(kind: Any, prefix: str = "") -> frozenset[str]:
    """Dotted names of all fields and sections."""
    names: set[str] = set()
    for field in dataclasses.fields(kind):
        names.add(f"{prefix}{field.name}")
        if field.default_factory not in (dataclasses.MISSING, dict):
            names |= fields(type(field.default_factory()), f"{prefix}{field.name}.")
    return frozenset(names)


def known() -> frozenset[str]:
    commands = (
        *(ServeConfig, GenerateOptions, EvalConfig, EnvCheckConfig, NewTaskConfig),
        *(ChaosOptions, PreviewConfig, ReplayConfig, ReportOptions, ViewOptions),
        *(WorkerOptions, KeysConfig, LaunchScriptOptions, *OPTIONS_OF_KINDS),
    )
    sections = (fields(RunConfig), fields(PolicyConfig, "policy."))
    supervised = (fields(type(one)) for one in (SFT, DPO))
    return frozenset().union(*sections, *(fields(kind) for kind in commands), *supervised)


def test_the_whole_configuration_of_an_agent_task_is_complete(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    block = r"^```python\n(# my_agent\.py\n.*?)^```"
    (program,) = re.findall(block, page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "my_agent.py"
    file.write_text(program)
    config = load_config(file, ["--output-dir", str(tmp_path)])
    prepared = prepare_run(config, HostFacts(num_cores=2, memory_bytes=24 << 30))
    assert prepared.notes == ()
    assert evaluation_problems(with_value(config, "evaluation.num_problems", 100))


def test_the_task_of_all_agent_libraries_has_problems_for_both_splits() -> None:
    page = (ROOT / "docs" / "agent_libraries.md").read_text()
    (program, *_) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(program, names)
    task = names["WordProblems"]()
    train, validation = (task.dataset(split, seed=0) for split in ("train", "validation"))
    answers = {train.next().data["answer"] for _ in range(800)}
    assert {"20", "78"} <= answers | {validation.next().data["answer"] for _ in range(100)}


OF_OTHERS = {f"docs/{name}.md" for name in ("performance", "tasks", "coming_from")}


# The other pages also have options of benchmarks, of other programs and of other libraries.
@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_OTHERS])
def test_every_option_that_a_page_names_exists(page: str) -> None:
    lines = [line for line in (ROOT / page).read_text().splitlines() if not NOT_OURS.search(line)]
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*[a-z]", "\n".join(lines)))
    # A flag has two forms: --section.name and --section.no-name.
    named = {re.sub(r"\.no-", ".", flag[2:]).replace("-", "_") for flag in flags - FLAGS}
    sections = {name.partition(".")[0] for name in known() if "." in name}
    dotted = re.compile(rf"`((?:{'|'.join(sections)})\.\w+(?:\.\w+)*)(?<!jsonl)(?<!json)`")
    named |= set(dotted.findall("\n".join(lines)))
    assert {name for name in named if not name.startswith("task.")} - MODULES - known() == set()


def test_the_options_that_others_have_become_ours_with_our_defaults() -> None:
    rows = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "docs" / "coming_from.md").read_text(), re.M)
    named = re.findall(r"`(\w+\.[\w.]+)`(?: \(([\d.e-]+)[^)]*\))?", "\n".join(rows))
    ours = [(name, value) for name, value in named if not name.endswith(".jsonl")]
    assert len(ours) > 60
    known = fields(RunConfig) | fields(PolicyConfig, "policy.") | {"DataTask.score"}
    known |= fields(type(SFT)) | fields(type(DPO))
    assert {name for name, _ in ours} - known == set()
    for name, value in ours:
        if value:
            section, _, field = name.rpartition(".")
            kind = RunConfig
            for part in section.split("."):
                kind = type({f.name: f for f in dataclasses.fields(kind)}[part].default_factory())
            defaults = {f.name: f.default for f in dataclasses.fields(kind)}
            assert float(defaults[field]) == float(value), name
