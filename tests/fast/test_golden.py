"""What users see, as it was when somebody last looked: a change of it is a change of a file in
``tests/golden``, made with UPDATE_GOLDEN=1 and read before it is committed."""

from __future__ import annotations

import importlib
import inspect
import json
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path

import pytest

import torchtitan_rl
from tests.support.golden import check_golden
from tests.support.ready_configs import LAPTOP, READY, SUPERVISED, ready
from torchtitan_rl.commands.cli import COMMANDS, main
from torchtitan_rl.commands.console import plain
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.observability.sinks import metric_names

TITAN = "PolicyTrainer"  # takes seconds to import
SCRIPTS = {
    "slurm": [],
    "kubernetes": ["--image", "image"],
    "ssh": ["--nodes", "node0", "node1"],
    "docker-compose": ["--image", "image"],
}
CONFIG = "alphabet_sort_tiny"
HELP = [
    "",
    *COMMANDS,
    f"train {CONFIG}",
    f"sft sft_{CONFIG}",
    f"dpo dpo_{CONFIG}",
    f"env check {CONFIG}",
    f"data preview {CONFIG}",
    *(f"launch-script {kind}" for kind in SCRIPTS),
]


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with suppress(SystemExit):  # tyro's, after its help
        main(words)
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("command", HELP)
def test_help_is_as_it_was(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = printed([*command.split(), "--help"], capsys)
    check_golden(f"help/{command.replace(' ', '-') or 'all'}.txt", text)


@pytest.mark.parametrize("name", READY)
def test_the_plan_of_each_ready_configuration_is_as_it_was(name: str, tmp_path: Path) -> None:
    config, machine = ready(name, tmp_path)
    prepared = prepare_run(config, machine)
    document = json.dumps(plain(prepared.document()), indent=1)
    check_golden(
        f"plans/{name}.txt",
        f"{prepared.describe()}\n\n{document}",
        replaced={
            getattr(config.task, "retriever", "no retriever"): "RETRIEVER",
            str(tmp_path): "TMP",
        },
    )


@pytest.mark.parametrize("name", SUPERVISED)
def test_the_plan_of_each_ready_configuration_without_rollouts_is_as_it_was(
    name: str, tmp_path: Path
) -> None:
    config = importlib.import_module(f"torchtitan_rl.configs.{name}").config
    prepared = prepare_run(replace(config, output_dir=tmp_path).run(), LAPTOP)
    document = json.dumps(plain(prepared.document()), indent=1)
    check_golden(
        f"plans/{name}.txt",
        f"{prepared.describe()}\n\n{document}",
        replaced={str(tmp_path): "TMP"},
    )


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_launch_script_of_each_kind_is_as_it_was(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch-script", kind, CONFIG, "--hosts", "2x0", "--keys", "keys", *SCRIPTS[kind]]
    check_golden(f"scripts/{kind}.txt", printed(words, capsys))


def test_the_metrics_are_as_they_were() -> None:
    check_golden("metrics.txt", "\n".join(sorted(metric_names())))


def test_what_the_package_exports_is_as_it_was() -> None:
    lines = []
    for name in sorted(torchtitan_rl.__all__):
        value = None if name == TITAN else getattr(torchtitan_rl, name)
        lines.append(name)
        if is_dataclass(value) or inspect.isfunction(value):
            lines += [f"    {parameter}" for parameter in inspect.signature(value).parameters]
        elif inspect.isclass(value):
            own = (key for key, one in vars(value).items() if callable(one) or key[0] != "_")
            lines += [f"    {key}" for key in sorted(own) if key[0] != "_"]
    check_golden("api.txt", "\n".join(lines))
