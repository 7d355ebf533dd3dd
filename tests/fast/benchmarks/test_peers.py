"""The comparison with TRL without TRL: both sides get the same work, and what the runs come to."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from benchmarks import peers
from benchmarks.peers_report import SideRun, figures, report
from benchmarks.peers_setup import peers_python, requirements
from benchmarks.peers_work import WORKLOADS, Workload, even_share
from torchtitan_rl.config.checks.fields import field_errors
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.config.run import RunConfig

TAIL = Workload(prompt_tokens=5, median=4, groups=3, group_size=4)
SAMPLED = Workload(prompt_tokens=5, max_tokens=8, groups=3, group_size=4)
OPTIONS = argparse.Namespace(steps=7, row_len=64, trl_microbatch=None)


class Letters:
    """A tokenizer with one token for each letter."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def our_config(workload: Workload) -> RunConfig:
    return load_config(peers.CONFIG, peers.our_words(OPTIONS, workload, Path("p"), staleness=1))


def environments(workload: Workload, index: int) -> list[tuple[tuple[int, ...], int | None]]:
    """Prompt and longest answer of each sibling of our group ``index``."""
    config = our_config(workload)
    dataset = config.task.dataset("train", seed=0)
    problems = [dataset.next() for _ in range(index + 1)]
    made = [
        config.task.environment(problems[index], tokenizer=Letters(), limits=config.rollout)
        for _ in range(workload.group_size)
    ]
    first = [asyncio.run(env.reset()) for env in made]
    return [(one.prompt_token_ids, one.max_tokens) for one in first]


@pytest.mark.parametrize("step", [0, 2])
def test_both_sides_get_the_same_prompts_and_fixed_lengths(step):
    ours = [environments(TAIL, step * TAIL.groups + i) for i in range(3)]
    lengths = [length for group in ours for _, length in group]
    assert lengths == list(TAIL.step_lengths(step))  # what TRL's side forces
    assert sum(length >= 10 * TAIL.median for length in lengths) == 1
    for place, group in enumerate(ours):
        prompt = TAIL.prompt(step * TAIL.groups + place)
        assert {ids for ids, _ in group} == {tuple(map(ord, prompt))}
        assert len(prompt) == TAIL.prompt_tokens


def test_answers_with_sampled_ends_have_the_same_limit():
    assert {length for _, length in environments(SAMPLED, 0)} == {8}


def test_both_sides_get_the_same_settings(tmp_path):
    config = our_config(TAIL)
    work = peers.trl_work(OPTIONS, TAIL, tmp_path / "policy", tmp_path, tmp_path / "out")
    assert field_errors(config) == {}
    assert Workload(**work["workload"]) == TAIL
    assert (config.num_steps, config.schedule.staleness) == (work["steps"], 1) == (7, 1)
    assert (config.rollout.groups_per_step, config.rollout.group_size) == (3, 4)
    assert config.rollout.sampling.max_tokens_per_turn == TAIL.longest == 80
    assert config.generator.max_model_len == config.trainer.row_len == 85
    assert work["microbatch"] == TAIL.answers == 12
    assert work["optimizer"]["learning_rate"] == config.trainer.optimizer.learning_rate
    assert work["optimizer"]["betas"] == config.trainer.optimizer.betas
    assert (config.evaluation.num_problems, config.checkpoint.every) == (0, 0)


@pytest.mark.parametrize("size", [5, 24])
def test_a_microbatch_that_does_not_divide_the_answers_is_refused(size):
    assert peers.trl_microbatch(argparse.Namespace(trl_microbatch=4), TAIL) == 4
    with pytest.raises(SystemExit, match=f"--trl-microbatch {size}: give a divisor of the 12"):
        peers.trl_microbatch(argparse.Namespace(trl_microbatch=size), TAIL)


@pytest.mark.parametrize(
    "words", ["--steps 4", "--repeats 0", "--trl-microbatch 0", "--group-size 1", "--cores 99999"]
)
def test_options_that_cannot_be_measured_with_are_refused_at_once(words, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["peers", *words.split()])
    with pytest.raises(SystemExit) as refused:
        peers.main()
    assert refused.value.code == 2
    assert f"argument {words.split()[0]}: " in capsys.readouterr().err


def test_the_workloads_fit_the_policy():
    for workload in WORKLOADS.values():
        assert workload.prompt_tokens + workload.longest <= 1024
        assert workload.answers == 64


def test_the_reward_is_the_share_of_even_tokens():
    assert even_share([2, 3, 4, 6]) == 0.75
    assert even_share([]) == 0.0


def side_run(seconds: float, generated: int) -> SideRun:
    """Six steps; the first two and the last two are not measured."""
    return SideRun(
        seconds=[9.0, 9.0, seconds, seconds, 9.0, 9.0],
        rollout_s=[5.0, 5.0, seconds / 2, seconds / 2, 5.0, 5.0],
        generated=[99, 99, generated, generated, 99, 99],
        command_s=50.0 + 2 * seconds,
        packages={"trl": "1"},
    )


def test_ratios_are_medians_of_the_steps_and_tokens_per_second_of_each_repeat():
    runs = {
        "TRL": [side_run(2.0, 40), side_run(4.0, 40), side_run(2.0, 40)],
        "ours": [side_run(1.0, 50), side_run(1.0, 50), side_run(1.0, 50)],
    }
    found = figures(runs, SAMPLED, base="TRL")
    assert found["sides"]["TRL"]["s_per_step"] == 2.0
    assert found["sides"]["TRL"]["rollout_s"] == 1.0
    assert found["sides"]["TRL"]["outside_s"] == 14.0
    assert found["sides"]["ours"]["per_step"] == {"steps": 1.0, "processed": 110, "generated": 50}
    assert found["ratios"]["ours"] == {"steps": 2.0, "processed": 2.2, "generated": 2.5}
    assert found["difference_of_work"]["ours"] == pytest.approx(0.1)
    assert not found["is_same_work"]


def test_the_work_is_the_same_within_two_percent():
    runs = {"TRL": [side_run(2.0, 40)], "ours": [side_run(1.0, 41)]}
    assert figures(runs, SAMPLED, base="TRL")["is_same_work"]


def test_an_answer_without_its_fixed_length_is_found():
    lengths = [sum(TAIL.step_lengths(step)) for step in range(6)]
    right = replace(side_run(1.0, 0), generated=lengths)
    wrong = replace(right, generated=[*lengths[:5], lengths[5] - 1])
    assert figures({"TRL": [right], "ours": [right]}, TAIL, base="TRL")["is_same_work"]
    with pytest.raises(SystemExit, match="ours: step 5 has"):
        figures({"TRL": [right], "ours": [wrong]}, TAIL, base="TRL")


def test_a_run_that_is_too_short_is_refused():
    short = replace(side_run(1.0, 1), seconds=[1.0] * 4)
    with pytest.raises(SystemExit, match="more than 4"):
        figures({"TRL": [short]}, SAMPLED, base="TRL")


def test_the_report_has_a_table_a_picture_and_all_repeats(tmp_path, capsys):
    path = tmp_path / "peers.json"
    runs = {"long prompt": {"TRL": [side_run(2.0, 40)], "ours, S=0": [side_run(1.0, 40)]}}
    report(runs, {"long prompt": SAMPLED}, {"options": {"steps": "6"}}, path, base="TRL")
    assert "2.00x" in capsys.readouterr().out
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    written = json.loads(path.read_text())
    assert written["TRL_packages"] == {"trl": "1"}
    assert written["options"] == {"steps": "6"}
    repeats = written["workloads"]["long prompt"]["repeats"]
    assert repeats["TRL"][0]["seconds"] == [9.0, 9.0, 2.0, 2.0, 9.0, 9.0]


def test_trl_is_pinned():
    (requirement,) = requirements()
    assert requirement == "trl==1.16.0"


def test_an_index_that_cannot_be_reached_is_named_as_the_cause(tmp_path):
    with pytest.raises(SystemExit, match="needs a package index that pip reaches"):
        peers_python(tmp_path / "environment", [f"{tmp_path}/there-is-no-such-wheel"])


@pytest.mark.parametrize("name", ["thesis.tex", "requirements.txt"])
def test_a_folder_that_was_not_made_here_is_kept_and_refused(tmp_path, name):
    (tmp_path / name).write_text("numpy\n")
    with pytest.raises(SystemExit, match="did not make it"):
        peers_python(tmp_path, ["numpy"])
    assert (tmp_path / name).read_text() == "numpy\n"
    with pytest.raises(SystemExit, match="is no folder"):
        peers_python(tmp_path / name, ["numpy"])


def test_an_environment_that_was_not_finished_is_made_again(tmp_path):
    with pytest.raises(SystemExit, match="cannot be installed"):
        peers_python(tmp_path, [f"{tmp_path}/there-is-no-such-wheel"])
    assert peers_python(tmp_path, ["numpy"]).exists()


def test_the_environment_sees_the_running_packages_but_vllm_and_is_made_once(tmp_path):
    python = peers_python(tmp_path / "environment", ["numpy"])
    show = "import importlib.util as i, numpy, sys; print(numpy.__file__, sys.prefix, {})"
    found = subprocess.run(
        [python, "-c", show.format("i.find_spec('vllm')")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == [numpy.__file__, str(tmp_path / "environment"), "None"]
    made = python.lstat().st_mtime_ns
    assert peers_python(tmp_path / "environment", ["numpy"]) == python
    assert python.lstat().st_mtime_ns == made
