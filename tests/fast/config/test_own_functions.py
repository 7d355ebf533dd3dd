"""A loss and an advantage of the user's own: found by a path and tried before the start. The
example of the documentation works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.config_mutations import with_value
from tests.support.ready_configs import ready
from torchtitan_rl.bounds import absolute, load_function
from torchtitan_rl.config.checks import advantage_errors, loss_errors
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.rollout.config import OverlongConfig, RolloutConfig
from torchtitan_rl.training.config import LossConfig

PAGE = Path(__file__).parents[3] / "docs" / "training.md"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    (code,) = re.findall(r"^```python\n(# mine\.py\n.*?)^```", PAGE.read_text(), re.M | re.S)
    path = tmp_path / "mine.py"
    path.write_text(code)
    return path


def refused(name: str) -> str:
    """Why this loss is."""
    (error,) = loss_errors(LossConfig(function=name), staleness=0)
    assert error.startswith(f"trainer.loss.function is {name!r}: ")
    assert "\n" not in error
    return error


def test_the_example_of_the_documentation_keeps_both_contracts(
    example: Path, monkeypatch: pytest.MonkeyPatch
):
    assert loss_errors(LossConfig(function=f"{example}:reinforce"), staleness=1) == []
    advantage = RolloutConfig(advantage=f"{example}:above_best_other")
    assert advantage_errors(advantage) == []
    assert load_function(advantage.advantage)([1.0, 0.0, 3.0], []) == [-2.0, -3.0, 2.0]
    monkeypatch.chdir(example.parent)
    assert loss_errors(LossConfig(function="mine.py:reinforce"), staleness=1) == []
    monkeypatch.syspath_prepend(example.parent)
    assert loss_errors(LossConfig(function="mine:reinforce"), staleness=1) == []


def test_the_plan_names_own_functions(example: Path, tmp_path: Path) -> None:
    config, machine = ready("alphabet_sort_tiny", tmp_path)
    assert prepare_run(config, machine).notes == ()
    config = with_value(config, "trainer.loss.function", f"{example}:reinforce")
    config = with_value(config, "rollout.advantage", f"{example}:above_best_other")
    prepared = prepare_run(config, machine)
    assert prepared.notes == (
        f"loss: {example}:reinforce (trainer.loss.function)",
        f"advantage: {example}:above_best_other (rollout.advantage)",
    )
    assert set(prepared.notes) < set(prepared.describe().splitlines())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mine", "give package.module:function or path/file.py:function"),
        ("no_such_module:loss", "cannot be imported .*ModuleNotFoundError"),
        ("no/such/file.py:loss", "cannot be imported .*FileNotFoundError"),
        ("json:loss", "has no function 'loss'"),
        ("json:dumps", "fails on a few made tokens"),
    ],
)
def test_a_loss_that_cannot_be_used_is_one_line_about_its_field(name: str, problem: str):
    assert re.search(problem, refused(name))


def test_a_wrong_name_of_a_function_is_answered_by_those_of_the_file(example: Path) -> None:
    text = f"{example} has no function 'above_best'; it has above_best_other, reinforce"
    assert refused(f"{example}:above_best").endswith(text)
    (error,) = advantage_errors(RolloutConfig(advantage=f"{example}:above_best"))
    assert error.endswith(f"{text}; built in: mean, std, leave_one_out, pair, none")


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit",
        "def loss(tokens, *, totals, config): raise SystemExit",
        "def loss(tokens, *, totals, config): return output(tokens, {'own/x': 1.0})",
        "def loss(tokens, *, totals, config): return output(tokens, {1: torch.zeros(())})",
        "def loss(tokens, *, totals, config): return output(tokens, None)",
    ],
)
def test_what_a_loss_does_wrong_neither_ends_the_command_nor_has_a_traceback(
    tmp_path: Path, code: str
):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom torchtitan_rl import LossOutput\n"
        "def output(tokens, sums):\n"
        "    loss = tokens.cleaned().logprobs_T.sum()\n"
        "    return LossOutput(loss=loss, sums=sums, maxima={})\n" + code
    )
    assert refused(f"{path}:loss")


@pytest.mark.parametrize(
    ("advantage", "problem"),
    [
        ("meen", "; built in: mean, std, leave_one_out"),
        ("math:fsum", "TypeError"),
        ("builtins:max", "TypeError"),
        ("builtins:zip", "TypeError"),
    ],
)
def test_an_advantage_that_cannot_be_used_is_one_line_about_its_field(advantage: str, problem: str):
    (error,) = advantage_errors(RolloutConfig(advantage=advantage))
    assert error.startswith(f"rollout.advantage is {advantage!r}: ")
    assert problem in error
    assert "\n" not in error


def test_weights_of_credit_by_turn_are_refused_where_nothing_reads_them():
    given = RolloutConfig(turn_discount=0.9, final_reward_weight=0.0)
    assert [error.split(" is ")[0] for error in advantage_errors(given)] == [
        "rollout.turn_discount",
        "rollout.final_reward_weight",
    ]
    assert advantage_errors(replace(given, credit="turn")) == []


def test_an_advantage_is_tried_with_one_sibling_alone(tmp_path: Path):
    """The others may fail."""
    path = tmp_path / "best.py"
    path.write_text("def best(values, rollouts): return [v - max(values[1:]) for v in values]")
    (error,) = advantage_errors(RolloutConfig(advantage=f"{path}:best"))
    assert re.search(r"for \[0\.0\]: ValueError", error)


def test_a_penalty_on_a_reward_without_weight_is_refused():
    given = RolloutConfig(
        credit="turn", final_reward_weight=0.0, overlong=OverlongConfig(buffer_tokens=4)
    )
    (error,) = advantage_errors(given)
    assert error.startswith("rollout.final_reward_weight is 0: the penalty")
    assert advantage_errors(replace(given, final_reward_weight=0.5)) == []


def test_another_process_in_another_folder_loads_the_same_file(example: Path):
    name = absolute(f"{os.path.relpath(example)}:reinforce")
    load = "import sys; from torchtitan_rl.bounds import load_function as f; f(sys.argv[1])"
    subprocess.run([sys.executable, "-c", load, name], check=True, cwd="/")
    assert absolute("math:fsum") == "math:fsum"
