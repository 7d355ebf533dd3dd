"""The stand-alone generator: one process, two tensor-parallel ranks under torchrun, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real.models import hf_logprobs, tiny_tokenizer
from tests.real.runs import run_module
from torchtitan_rl.commands.cli import main

GOOD = [
    {"prompt": "sort these names: ", "temperature": 0, "id": "greedy"},
    {"prompt_token_ids": [40, 41, 42], "seed": 4, "ignore_eos": True, "max_tokens": 40},
    {"prompt": "again", "seed": 5, "id": "greedy"},
]
BAD = ["not json", {"prompt": "x", "max_tokens": 9000, "id": "long"}, {"text": "x"}]


def generate(
    model: Path, folder: Path, lines: list[Any], *, ranks: int = 1, code: int = 0
) -> list[dict[str, Any]]:
    """The answers in the output file."""
    folder.mkdir()
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "in.jsonl").write_text("\n".join(texts) + "\n\n")
    run_module(
        "torchtitan_rl.commands.generate",
        *("--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")),
        *("--model", str(model), "--kv-cache-bytes", str(32 << 20)),
        ranks=ranks,
        code=code,
        OMP_NUM_THREADS="1",
    )
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_answers_are_the_models_and_bad_lines_fail_alone(checkpoint: Path, tmp_path: Path) -> None:
    mixed = [GOOD[0], BAD[0], GOOD[1], BAD[1], GOOD[2], BAD[2]]
    alone = generate(checkpoint, tmp_path / "one", mixed, code=1)
    answers = [alone[0], alone[2], alone[4]]
    assert [answer["id"] for answer in alone] == ["greedy", 2, 3, "long", "greedy", 6]
    assert "not JSON" in alone[1]["error"]
    assert "set it to at most 511" in alone[3]["error"]
    assert "unknown fields ['text']" in alone[5]["error"] or "prompt" in alone[5]["error"]
    greedy = answers[0]
    prompt = tuple(tiny_tokenizer().encode(GOOD[0]["prompt"]))
    expected = hf_logprobs(checkpoint, (*prompt, *greedy["token_ids"]), num_prompt=len(prompt))
    assert greedy["logprobs"] == pytest.approx(expected, abs=1e-5)
    assert greedy["text"] == tiny_tokenizer().decode(greedy["token_ids"])
    assert greedy["versions"] == [0] * len(greedy["token_ids"])
    assert len(answers[1]["token_ids"]) == 40
    assert answers[1]["finish_reason"] == "length"
    assert answers[1]["metrics"]["time_to_first_token_s"] > 0


@pytest.mark.soak
def test_two_ranks_answer_as_one_process_does(checkpoint: Path, tmp_path: Path) -> None:
    one = generate(checkpoint, tmp_path / "one", GOOD)
    two = generate(checkpoint, tmp_path / "two", GOOD, ranks=2)
    assert [row["token_ids"] for row in two] == [row["token_ids"] for row in one]
    for mine, theirs in zip(two, one, strict=True):
        assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-5)


def test_wrong_options_are_named_before_an_engine_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: str(tmp_path / name / "x") for name in ("model", "input", "output")}
    arguments = [word for name, path in names.items() for word in (f"--{name}", path)]
    assert main(["generate", *arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in errors] == ["--model", "--input", "--output"]
