"""The problems, the user and the calculator of the agents of all libraries.

A problem is a word problem of `calculator_agent` without one of its numbers. The user knows the
number and tells it when asked; then the calculator can solve the problem. An `Exercise` is the user
and the calculator of one rollout, and records the agent's questions and calls.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl import AgentResult, Problem, Split
from torchtitan_rl.experiments.calculator_agent import dataset as whole
from torchtitan_rl.experiments.calculator_agent.agent import Solution
from torchtitan_rl.experiments.calculator_agent.calculator import (
    CalculatorError,
    as_text,
    calculate,
)
from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes
from torchtitan_rl.experiments.calculator_agent.task import is_right, score

INSTRUCTIONS = "Solve the problem with the calculator."
MAX_REQUESTS = 6  # an agent gives up after so many; a right solution needs three


@dataclass(slots=True, kw_only=True)
class Exercise:
    """``problem`` is the data of a problem of `make_problem`."""

    problem: Mapping[str, Any]
    was_asked: bool = False
    num_calls: int = 0
    results: list[str] = field(default_factory=list)

    @property
    def question(self) -> str:
        """The user's first message."""
        text: str = self.problem["text"]
        return text

    def reply(self, said: str) -> str | None:
        """Return the user's next message; None if the conversation is over.

        The user answers one question, and treats every other message as the agent's answer.
        """
        if self.was_asked or "?" not in said:
            return None
        self.was_asked = True
        return reply_text(self.problem["missing"])

    def calculator(self, expression: str) -> str:
        """arithmetic

        Args:
            expression: such as 12*(3+4)
        """
        self.num_calls += 1
        try:
            result = as_text(calculate(expression))
        except CalculatorError as error:
            return f"error: {error}"
        self.results.append(result)
        return result

    def checked_calculator(self, arguments: Any) -> str:
        """Call `calculator`, for clients that do not check the arguments of a call."""
        match arguments:
            case {"expression": str(expression)}:
                return self.calculator(expression)
        return "error: the arguments must be one expression"

    def result(self, answer: str | None, *, library: str) -> AgentResult:
        """Score the agent's last message, as `calculator_agent` does."""
        solution = Solution(answer=answer, num_calls=self.num_calls, results=tuple(self.results))
        right_answer = self.problem["answer"]
        reward = score(solution, right_answer)
        return AgentResult(
            reward=reward,
            metrics={
                f"reward/{library}": reward,
                "right_answers": float(is_right(solution, right_answer)),
                "asked": float(self.was_asked),
                "calls": float(self.num_calls),
                "gave_up": float(answer is None),
            },
        )


def reply_text(number: object) -> str:
    return f"It is {number}."


def make_problem(split: Split, index: int, sizes: ProblemSizes) -> Problem:
    """Make problem ``index`` of ``split``. ``text`` has "some" instead of the number ``missing``;
    ``expression`` and ``answer`` are those of the whole problem."""
    data = whole.make_problem(split, index, sizes).data
    problem_id = f"agent_libraries/{split}/{index}"
    number = random.Random(problem_id).choice(re.findall(r"\d+", data["expression"]))
    text = re.sub(rf"\b{number}\b", "some", data["text"], count=1)
    return Problem(
        problem_id=problem_id,
        data={**data, "text": text[0].upper() + text[1:], "missing": int(number)},
    )
