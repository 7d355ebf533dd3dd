"""The configurations of real tasks at toy size, without an engine: problems, environments and
rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ready_configs import TOYS, toy
from torchtitan_rl.commands.cli import main
from torchtitan_rl.experiments.search.warm_start import call_text

pytest.importorskip("bm25s")
pytest.importorskip("math_verify")
SAID = {
    "gsm8k_qwen3_0_6b": ("#### 3",),
    "gsm8k_qwen3_4b": ("#### 3",),
    "gsm8k_qwen3_8b_lora": ("#### 3",),
    "dapo_math_qwen3_8b": ("The answer is 1+2 = 3.\n#### 3",),
    "search_r1_qwen3_4b": (call_text("Irene Stone"), "<answer>Kelso</answer>"),
    "code_qwen3_4b": ("```python\nprint(int(input()) + 3)\n```",),
}


@pytest.mark.parametrize("name", TOYS)
def test_the_environment_of_a_real_task_has_no_mistake_at_toy_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*toy(name, tmp_path), "--task.sandbox.isolation", "limits", "--max-block-ms", "60000"]
    code = main(["env", "check", *words, "--problems", "2", "--say", *SAID[name]])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert "nothing wrong was found" in out
