"""Profiles of chosen optimizer steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from torchtitan_rl.backends.titan.profiler import StepProfiler
from torchtitan_rl.training.config import ProfileConfig

CHOSEN = ProfileConfig(steps=(5,), ranks=(1,))


def train(profiler: StepProfiler) -> None:
    for number in (4, 5, 6):
        with profiler.step(number):
            torch.ones(8, 8) @ torch.ones(8, 8)


def test_a_chosen_step_of_a_chosen_rank_leaves_a_trace_that_names_it(tmp_path: Path) -> None:
    for rank in (0, 1):
        train(StepProfiler(CHOSEN, tmp_path / "profile", rank))
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "step5-rank1.json.gz"
    with gzip.open(file) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"optimizer step 5", "aten::mm"} <= names


def test_on_cuda_the_memory_of_the_step_is_recorded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda enabled="all": said.append(f"record {enabled}")
    )
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: said.append(Path(path).name))
    train(StepProfiler(CHOSEN, tmp_path, 1))
    assert said == ["record all", "step5-rank1-memory.pickle", "record None"]


def test_a_folder_that_cannot_be_made_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    train(StepProfiler(CHOSEN, tmp_path / "profile", 1))


def test_an_error_of_the_step_itself_is_not_taken_for_one_of_its_profile(tmp_path: Path) -> None:
    profiler = StepProfiler(CHOSEN, tmp_path, 1)
    with pytest.raises(OSError, match="of the step"), profiler.step(5):
        raise OSError("of the step")
