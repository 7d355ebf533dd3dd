from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_rl.config.loader import load_config
from torchtitan_rl.errors import ConfigError

_FILE = """
from dataclasses import dataclass
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.rollout.task import Task

@dataclass(frozen=True, kw_only=True)
class Sorting(Task):
    names: int = 3

config = RunConfig(policy=PolicyConfig(checkpoint="here"), task=Sorting(names=4), num_steps=7)
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "sorting.py"
    path.write_text(_FILE)
    return path


def test_a_file_gives_the_values_and_options_override_them(path):
    config = load_config(path, ["--task.names", "9", "--generator.replicas", "5"])
    assert (config.num_steps, config.task.names, config.generator.replicas) == (7, 9, 5)


_MIXTURE = """
from torchtitan_rl import MixtureTask, PolicyConfig, RunConfig, Task

parts = {"a": Task(), "b": MixtureTask(tasks={"c": Task()})}
config = RunConfig(policy=PolicyConfig(checkpoint="here"), task=MixtureTask(tasks=parts))
"""


@pytest.mark.filterwarnings("ignore:The field `task.tasks` is annotated")
def test_a_weight_can_be_given_for_a_part_that_has_none(path):
    path.write_text(_MIXTURE)
    config = load_config(path, ["--task.weights.a", "3", "--task.tasks.b.weights.c", "2"])
    assert config.task.weights == {"a": 3.0, "b": 1.0}
    assert config.task.tasks["b"].weights == {"c": 2.0}
    path.write_text(_MIXTURE.replace("=parts", "=[1]"))
    assert load_config(path, []).task.tasks == [1]  # an error of the check


def test_an_unknown_option_is_one_error_that_suggests_the_right_one(path):
    with pytest.raises(ConfigError, match=r"similar: --generator\.replicas") as refused:
        load_config(path, ["--generator.replica", "5"])
    assert len(refused.value.errors) == 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.py: there is no such file"):
        load_config(tmp_path / "nothing.py", [])
    with pytest.raises(ConfigError, match=r"tiny: it is for torchtitan-rl sft; give a"):
        load_config(Path("sft_alphabet_sort_tiny"), [])


def test_a_file_without_a_config_says_what_to_write(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"config = RunConfig\("):
        load_config(path, [])


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("x = 1\ny = 1 / 0\n", "line 2, ZeroDivisionError: division by zero"),
        ("def\n", "SyntaxError"),
        ("import no_such_module\n", "line 1, ModuleNotFoundError: No module named"),
        ("x = 1\nraise SystemExit(0)\n", "line 2, SystemExit: 0"),
    ],
)
def test_a_file_that_does_not_run_is_one_line_with_its_place(text, cause, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(path, [])
    (message,) = refused.value.errors
    assert cause in message
    assert "\n" not in message


def test_a_file_comes_before_a_ready_configuration_of_the_same_name(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    path.rename("alphabet_sort_tiny")
    with pytest.raises(ConfigError, match="give a Python file"):
        load_config(Path("alphabet_sort_tiny"), [])


def test_an_unknown_name_is_answered_by_the_ready_ones():
    with pytest.raises(ConfigError, match=r"one of .*alphabet_sort_smollm2, alphabet_sort_tiny"):
        load_config(Path("alphabet_sort"), [])


def test_a_wrong_value_in_the_file_is_left_to_the_checks(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from torchtitan_rl.configs.alphabet_sort_tiny import config\n"
        "from dataclasses import replace\n"
        "config = replace(config, trainer=replace(config.trainer, max_episode_tokens=0))\n"
    )
    assert load_config(path, []).trainer.max_episode_tokens == 0
