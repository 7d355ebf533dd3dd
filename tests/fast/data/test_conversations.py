"""Rows of conversations and pairs: what is accepted, and errors that name the row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.conversations import conversation, pairs_file, tokenizer, write_rows
from torchtitan_rl.data.conversations import Conversations, ExamplesConfig, PairsConfig
from torchtitan_rl.data.rows import DataError
from torchtitan_rl.environments.supervised import HeldOutConfig, SupervisedTask
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.rollout.rendering import load_tokenizer, make_renderer

USER = {"role": "user", "content": "Sort Ann"}
SAID = {"role": "assistant", "content": "Ann"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def opened(
    folder: Path, rows: list[dict[str, Any]], config: Any = ExamplesConfig, **fields: Any
) -> Conversations:
    file = write_rows(folder / "rows.jsonl", rows)
    data = config(train=(file,), renderer="chatml", **fields)
    return Conversations(data, data.train, tokenizer(), seed=0, shuffle=False, max_tokens=200)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": "Hi"}, "line 1: no column 'messages'; it has prompt"),
        ({"messages": None}, "column 'messages' is null"),
        ({"messages": "Hi"}, "column 'messages' is not a list of messages such as"),
        ({"messages": []}, "column 'messages' is not a list of messages"),
        ({"messages": [{"content": "Hi"}]}, "column 'messages' is not a list of messages"),
        ({"messages": [USER]}, "it has no assistant message to learn"),
        ({"messages": [SAID, USER]}, "the first message is the assistant's"),
        (
            {"messages": [USER, SAID, USER, {"role": "assistant", "content": " \n"}]},
            "message 4 of 'messages' is the assistant's and is empty; give it content or",
        ),
        ({"messages": [USER, SAID | {"tool_calls": [CALL]}]}, "leaves out tool_calls"),
        ({"messages": [USER, SAID | {"reasoning_content": "a"}]}, "leaves out reasoning_content"),
        ({"messages": [USER, SAID], "tools": [TOOL]}, "leaves out tools"),
        # Some chat formats render these as nothing.
        ({"messages": [USER, SAID | {"content": math.nan}]}, "content is nan; give a text"),
        ({"messages": [USER | {"content": 5}, SAID]}, "message 1 of 'messages': content is 5"),
        ({"messages": [USER, SAID | {"reasoning_content": 5}]}, "reasoning_content is 5; give"),
        ({"messages": [USER, SAID | {"weight": 0}]}, "weight is 0, and every turn of the"),
        ({"messages": [USER, SAID | {"tool_calls": ["f()"]}]}, "tool_calls is ['f()']; give a"),
        (
            {"messages": [USER, SAID | {"content": "a\ud800"}]},
            "column 'messages' has half of a surrogate pair",
        ),
        (
            {"messages": [USER | {"content": [{"type": "image_url", "image_url": "a"}]}, SAID]},
            "leaves out all content but texts",
        ),
        ({"messages": [USER, SAID], "tools": "f("}, "column 'tools' is not JSON"),
        ({"messages": [USER, SAID], "tools": {"f": 1}}, "column 'tools' is not a list of tools"),
    ],
)
def test_a_row_that_cannot_be_used_is_an_error(row: Any, error: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as found:
        opened(tmp_path, [row]).read(range(1))
    assert f"{tmp_path}/rows.jsonl, line 1" in str(found.value)
    assert error in str(found.value)


def test_messages_that_a_chat_format_drops_are_an_error(tmp_path: Path) -> None:
    """Qwen3's format has tool calls, and drops messages of roles that it does not know."""
    qwen3, place = make_renderer(load_tokenizer(POLICY_DIR), kind="qwen3"), "line 1"
    called = {"messages": [USER, SAID | {"tool_calls": [CALL]}]}
    (episode,) = ExamplesConfig().episodes("one", place, called, qwen3)
    assert episode.num_trained_tokens > 20
    row = {"messages": [USER, {"role": "critic", "content": "No"}, SAID]}
    with pytest.raises(DataError, match="leaves out messages of role 'critic'"):
        ExamplesConfig().episodes("one", place, row, qwen3)


def test_nulls_of_parquet_are_no_fields(tmp_path: Path) -> None:
    plain, with_nulls = (
        opened(tmp_path, [{"messages": messages}]).read(range(1))[0]
        for messages in (
            [USER, SAID],
            [USER | {"tool_calls": None}, SAID | {"tool_calls": None, "name": None}],
        )
    )
    assert plain[0].episodes == with_nulls[0].episodes


def test_tools_are_a_list_or_its_json() -> None:
    qwen3 = make_renderer(load_tokenizer(POLICY_DIR), kind="qwen3")
    without, *found = (
        ExamplesConfig().episodes("one", "line 1", row, qwen3)
        for row in (
            {"messages": [USER, SAID]},
            {"messages": [USER, SAID], "tools": [TOOL]},
            {"messages": [USER, SAID], "tools": json.dumps([TOOL])},
        )
    )
    assert found[0] == found[1]
    assert len(found[0][0].token_ids) > len(without[0].token_ids)


def test_parquet_and_hub_datasets_give_the_rows_of_json_lines(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": conversation(number)} for number in range(5)]
    lines = opened(tmp_path, rows)
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    wanted = [one.episodes[0].token_ids for one in lines.read(range(5))[0]]
    for file in (str(tmp_path / "rows.parquet"), f"hf:{tmp_path}/saved"):
        data = ExamplesConfig(train=(file,), renderer="chatml")
        other = Conversations(data, data.train, tokenizer(), seed=0, shuffle=False, max_tokens=200)
        assert [one.episodes[0].token_ids for one in other.read(range(5))[0]] == wanted


def test_pairs_are_texts_or_messages_with_or_without_a_prompt(tmp_path: Path) -> None:
    forms = [
        {"prompt": "Sort Ann", "chosen": "Ann", "rejected": "Bob"},
        {"prompt": [USER], "chosen": [SAID], "rejected": [SAID | {"content": "Bob"}]},
        {"chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "Bob"}]},
    ]
    found = []
    for form in forms:
        fields = {} if "prompt" in form else {"prompt": ""}
        examples, _ = opened(tmp_path, [form], PairsConfig, **fields).read(range(1))
        found.append([(one.token_ids, one.loss_mask) for one in examples[0].episodes])
    assert found[0] == found[1] == found[2]
    chosen, rejected = (
        tokenizer().decode([t for t, on in zip(*one, strict=True) if on]) for one in found[0]
    )
    assert (chosen, rejected) == ("Ann<|im_end|>", "Bob<|im_end|>")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rejected": "Ann"}, "chosen and rejected are equal"),
        ({"chosen": " "}, "message 1 of 'chosen' is the assistant's and is empty"),
        ({"chosen": [USER]}, "chosen: it has no assistant message to learn"),
        ({"prompt": 3}, "column 'prompt' is not a text, or a list of messages"),
    ],
)
def test_a_pair_that_cannot_be_used_is_an_error(
    change: dict[str, Any], error: str, tmp_path: Path
) -> None:
    row = {"prompt": "Sort Ann", "chosen": "Ann", "rejected": "Bob"} | change
    with pytest.raises(DataError, match=error):
        opened(tmp_path, [row], PairsConfig).read(range(1))


def test_rows_are_checked_before_the_run(tmp_path: Path) -> None:
    rows = [{"messages": conversation(n, "Ann " * (60 if n == 2 else 1))} for n in range(6)]
    held_out = HeldOutConfig(files=(write_rows(tmp_path / "held.jsonl", [{"text": "Hi"}]),))
    for too_long in ("drop", "refuse"):
        file = write_rows(tmp_path / "rows.jsonl", rows)
        data = ExamplesConfig(train=(file,), renderer="chatml", too_long=too_long)
        task = SupervisedTask(data=data, held_out=held_out)
        errors, notes = task.row_errors(tokenizer(), seed=0, num_steps=9, max_tokens=50)
        assert any("held_out.files" in one and "no column 'messages'" in one for one in errors)
        about_length = notes if too_long == "drop" else errors
        assert any(
            "1 of 6 rows are longer than trainer.max_episode_tokens (50)" in one
            for one in about_length
        )


def test_files_that_are_missing_or_empty_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert "examples.train is empty" in SupervisedTask(data=ExamplesConfig()).errors()[0]
    for name, error in {"none.jsonl": "no such file", "empty.jsonl": "there is no row"}.items():
        data = PairsConfig(train=(str(tmp_path / name),))
        (found,) = SupervisedTask(data=data, beta=0.1).errors()
        assert found.startswith("pairs.train")
        assert error in found


def test_the_same_name_in_two_files_is_two_rows(tmp_path: Path) -> None:
    config = PairsConfig(train=(pairs_file(tmp_path / "rows.jsonl", 2),), renderer="chatml")
    task = SupervisedTask(data=config, held_out=HeldOutConfig(files=config.train), beta=0.1)
    train = task.conversations(tokenizer(), seed=0, max_tokens=99)
    held_out = task.held_out_conversations(tokenizer(), max_tokens=99)
    assert held_out is not None
    assert not set(train.names(range(2))) & set(held_out.names(range(2)))
