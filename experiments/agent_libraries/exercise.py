"""What an agent finds in its world, whatever library it is written with.

A problem lacks one number. Its user knows the number, and says it when asked; then the calculator
solves the problem. An `Exercise` has both, for one rollout, and keeps what the agent did with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl import AgentResult
from torchtitan_rl.experiments.calculator_agent.agent import Solution
from torchtitan_rl.experiments.calculator_agent.calculator import (
    CalculatorError,
    as_text,
    calculate,
)
from torchtitan_rl.experiments.calculator_agent.scoring import is_right, score

INSTRUCTIONS = "Solve the problem with the calculator."
MAX_REQUESTS = 6  # after which an agent gives up; a right one needs three


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
        """The user's next message; None where there is none: the conversation is over.

        The user answers one question, and takes every other message as the agent's answer.
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
        """`calculator` for clients that do not check the arguments of a call."""
        match arguments:
            case {"expression": str(expression)}:
                return self.calculator(expression)
        return "error: the arguments must be one expression"

    def result(self, answer: str | None, *, library: str) -> AgentResult:
        """The reward of the agent's last message, as `calculator_agent.scoring` has it."""
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
