"""Online DPO by the verdicts of a judge: the task's own reward rises, on which nothing is trained.

The judge is a program behind a chat endpoint. It reads the texts of two siblings in its prompt.
"""

from __future__ import annotations

import json
import re
from difflib import SequenceMatcher
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.real.runs import Run, read_metrics, require_audit
from tests.support.chat_server import chat_server

pytestmark = pytest.mark.soak

_CONFIG = """
from dataclasses import replace

from torchtitan_rl import PairwiseJudgedTask, pairwise_judge
from torchtitan_rl.configs import alphabet_sort_tiny

tiny = alphabet_sort_tiny.config
judge = replace(pairwise_judge(), base_url={url!r})
config = replace(tiny, task=PairwiseJudgedTask(task=tiny.task, judge=judge))
"""


def verdict(messages: list[Any]) -> str:
    """Which of two siblings has more lines as the request wants them; the first one, if neither."""
    found = re.fullmatch(
        r".*?^Request:\n(.*)\n\nAnswer 1: (.*)\n\nAnswer 2: (.*)\n\nWhich answer .*",
        messages[-1]["content"],
        re.DOTALL | re.MULTILINE,
    )
    assert found is not None
    request, first, second = found.groups()
    return f"Better: {1 if _quality(request, first) >= _quality(request, second) else 2}"


def _quality(request: str, answer: str) -> float:
    """The mean similarity of each turn's lines to the sorted names."""
    said = json.loads(answer)
    messages = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
    names, new = list[str](), _names(request)
    alike = []
    for message in messages:
        if message["role"] == "user":
            new = _names(message["content"])
            continue
        marks = dict.fromkeys(new, " // new" if names else "")
        names = sorted([*names, *new])
        right = [f"{name}{marks.get(name, '')}" for name in names]
        alike.append(SequenceMatcher(None, right, message["content"].splitlines()).ratio())
    return fmean(alike)


def _names(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.fullmatch(r"[A-Z][a-z]+", line)]


def test_the_reward_rises_by_the_verdicts_of_a_judge_on_stale_rollouts(tmp_path: Path) -> None:
    with chat_server() as served:
        served.reply = verdict
        config = tmp_path / "judged_config.py"
        config.write_text(_CONFIG.format(url=served.base_url))
        words = [str(config), "--output-dir", str(tmp_path), "--name", "run"]
        words += ["--rollout.advantage", "pair", "--trainer.loss.surrogate", "dpo"]
        words += ["--rollout.group-size", "4", "--schedule.staleness", "1", "--num-steps", "30"]
        run = Run([*words, "--metrics.progress", "plain"], log=tmp_path / "log")
        run.require_success()
        num_asked = len(served.asked)
    require_audit(tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    steps = [row for row in rows if "train/rollouts" in row]
    rewards = {
        row["step"]: row["evaluation/task/reward/task"]
        for row in rows
        if "evaluation/task/reward/task" in row
    }
    print(rewards, num_asked, {row["policy/staleness_max"] for row in steps})
    assert rewards[30] > rewards[0] + 0.1
    assert num_asked > 1000
    assert max(row["policy/staleness_max"] for row in steps) == 1
    assert all(row["train/task/reward/judge/failures"] == 0 for row in steps)
    for row in steps:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/discarded"]
