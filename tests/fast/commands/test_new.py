"""``torchtitan-rl new task``; `tests/real/test_new_task.py` trains what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_rl.commands import cli
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.config.prepare import prepare_run


def test_it_writes_a_small_task_that_can_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "task", "my_sums"]) == 0
    files = sorted((tmp_path / "my_sums").iterdir())
    assert [file.name for file in files] == ["my_sums.py", "my_sums_task.py", "test_my_sums.py"]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 60
    config = load_config(files[0], ["--task.num-problems", "128"])
    assert len(prepare_run(config).evaluation_problems) == 64
    splits = [config.task.dataset(split, seed=0) for split in ("train", "validation")]
    train, validation = ({str(one.next().data) for _ in range(128)} for one in splits)
    assert len(train) == len(validation) == 128
    assert not train & validation


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["My-Sums"], "NAME is 'My-Sums': give lower-case letters"),
        (["class"], "NAME is 'class'"),
        (["json"], "NAME is 'json': a module of Python has this name; give another"),
        (["sums", "--folder", "."], "--folder is .: it exists; give another"),
        (["sums", "--folder", "/proc/none/sums"], "it cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", "task", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
