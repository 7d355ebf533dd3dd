from __future__ import annotations

from datetime import date

import pytest

from torchtitan_rl.data.columns import Condition, fill, template_error
from torchtitan_rl.data.rows import DataError

ROW = {
    "question": "1 + {1}?",
    "level": 3,
    "none": None,
    "solved": True,
    "reward_model": {"ground_truth": "2"},
    "day": date(2026, 1, 2),
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Q: {question}", "Q: 1 + {1}?"),
        ("{reward_model[ground_truth]} {{x}}", "2 {x}"),
        ("{level:02d}", "03"),
        ("no column", "no column"),
    ],
)
def test_a_template_is_filled_with_columns(template: str, text: str) -> None:
    assert template_error(template) is None
    assert fill(template, ROW, "a.jsonl, line 7") == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{answer}", "a.jsonl, line 7: no column 'answer'; it has question, level"),
        ("{none}", "a.jsonl, line 7: column 'none' is null"),
        ("{reward_model[style]}", "a.jsonl, line 7: .*cannot be filled .KeyError: 'style'"),
        ("{question:02d}", "a.jsonl, line 7: .*cannot be filled"),
    ],
)
def test_what_cannot_be_filled_is_an_error_with_file_line_and_column(
    template: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        fill(template, ROW, "a.jsonl, line 7")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("level <= 3", True),
        ("level<3", False),
        ("level == 3.0", True),
        ("none == null", True),
        ("none == None", True),
        ("none == 1", False),
        ("level != null", True),
        ("solved == true", True),
        ("solved == True", True),
        ("solved == False", False),
        ("question == '1 + {1}?'", True),
        ("question == 1 + {1}?", True),
        ('question == "1 + {1}?"', True),
    ],
)
def test_a_condition_compares_a_column_with_a_value(text: str, holds: bool) -> None:
    assert Condition(text).holds(ROW, "here") is holds


@pytest.mark.parametrize("text", ["level", "level = 3", "<= 3", ""])
def test_a_text_that_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a condition"):
        Condition(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "question != 1",
            "column 'question' is a text, and the value of 'question != 1' is a number; "
            "write the value as a text in double quotes",
        ),
        ("level == '3'", "a text; write the value as a number without quotes"),
        ("level == true", "a boolean; write the value as a number without quotes"),
        ("solved == 1", "a number; write the value as true or false"),
        ("day == 2026-01-02", "column 'day' is of type date, .* write the value as null"),
    ],
)
def test_a_value_of_another_type_is_an_error_and_not_a_filter(text: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl, line 7: .*{message}"):
        Condition(text).holds(ROW, "a.jsonl, line 7")
