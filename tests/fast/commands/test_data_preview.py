"""``torchtitan-rl data preview``: what the policy will see, and which row cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchtitan_rl.commands import cli
from torchtitan_rl.experiments.reasoning_gym.task import POLICY_DIR

CONFIG = """
from torchtitan_rl import DataTask, PolicyConfig, RunConfig

config = RunConfig(
    policy=PolicyConfig(checkpoint={policy!r}),
    task=DataTask(train=({file!r},), prompt="Say {{word}}.", answer="{{word}}", shuffle=False),
)
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"word": f"w{n}"}) + "\n" for n in range(40)))
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(policy=str(POLICY_DIR), file=str(rows)))
    return str(path)


@pytest.mark.slow
def test_the_problems_are_shown_as_the_policy_sees_them(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "preview", config, "--count", "2", "--all"]) == 0
    shown = capsys.readouterr().out
    assert '"answer": "w0"' in shown
    assert "<|im_start|>user\nSay w0.<|im_end|>\n<|im_start|>assistant\n" in shown
    assert shown.count("--- prompt, ") == 2
    assert "37 train problems\nprompts of" in shown
    assert "0 leave no room in rollout.max_total_tokens (512)" in shown
    assert cli.main(["data", "preview", config, "--count", "100"]) == 0
    assert capsys.readouterr().out.count("--- prompt, ") == 37  # one epoch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task.prompt", "{x}"], "rows.jsonl, line 1, task.prompt: no column 'x'; it has word"),
        (["--task.prompt", "{"], "task.prompt='{'"),
        (["--task.train", "none.jsonl"], "task.train: none.jsonl: there is no such file"),
        (["--count", "many"], "--count"),
        (["--split", "test"], "--split"),
    ],
)
def test_what_is_wrong_is_one_line(
    config: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "preview", config, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
