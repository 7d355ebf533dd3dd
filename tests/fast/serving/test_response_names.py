"""The requests of a response are those with its exact id, and its choices are counted by prompt."""

from __future__ import annotations

import pytest

from torchtitan_rl.serving.report import choices_of_response

TURN, TURN_2 = "chatcmpl-turn-00c0ffee", "chatcmpl-turn-2-00c0ffee"
CHOICES = [f"{index}_chatcmpl-a-00c0ffee" for index in range(3)]
PROMPTS = [f"cmpl-a-{prompt}-0000000{prompt}" for prompt in range(2)]
BOTH = [f"{index}_cmpl-a-{prompt}-0000000{prompt}" for prompt in range(2) for index in range(3)]
SESSION = [TURN, TURN_2, *CHOICES, "resp_1f_0-00c0ffee", "resp_1f2e_0-00c0ffee", "r1", "r1-2"]


@pytest.mark.parametrize(
    ("response_id", "found"),
    [
        ("chatcmpl-turn", [TURN]),
        ("chatcmpl-turn-2", [TURN_2]),
        ("chatcmpl-a", CHOICES),
        ("resp_1f", ["resp_1f_0-00c0ffee"]),
        ("r1", ["r1"]),
        *(
            (part, [])
            for part in ("chatcmpl", "chatcmpl-", "resp", "resp_1", "turn", "1_chatcmpl-a")
        ),
        (TURN, []),
    ],
)
def test_a_response_has_the_requests_with_its_exact_id(response_id: str, found: list[str]) -> None:
    assert list(choices_of_response(SESSION, response_id)) == found


@pytest.mark.parametrize("response", [[TURN], CHOICES, PROMPTS, BOTH])
def test_the_choices_of_all_prompts_are_counted_as_in_the_answer(response: list[str]) -> None:
    response_id = {TURN: "chatcmpl-turn", CHOICES[0]: "chatcmpl-a"}.get(response[0], "cmpl-a")
    choices = choices_of_response(response, response_id)
    assert choices == {request_id: choice for choice, request_id in enumerate(response)}
