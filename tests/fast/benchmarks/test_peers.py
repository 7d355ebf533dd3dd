"""The comparison with TRL without TRL: both sides get the same work, and what the runs come to."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peers_report import SideRun, report
from benchmarks.peers_work import Workload
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


def side_run(seconds: float, generated: int) -> SideRun:
    """Six steps; the first two and the last two are not measured."""
    return SideRun(
        seconds=[9.0, 9.0, seconds, seconds, 9.0, 9.0],
        rollout_s=[5.0, 5.0, seconds / 2, seconds / 2, 5.0, 5.0],
        generated=[99, 99, generated, generated, 99, 99],
        command_s=50.0 + 2 * seconds,
        packages={"trl": "1"},
    )


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
