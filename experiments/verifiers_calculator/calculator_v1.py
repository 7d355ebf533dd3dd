"""Word problems with one operation; a calculator, which verifiers starts once for all rollouts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from fractions import Fraction

import verifiers.v1 as vf

__all__ = ["CalculatorTaskset"]

SYSTEM_PROMPT = "Solve the problem with the calculator."
NAMES = ("Adam", "Alice", "Boris", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Irene")
THINGS = ("apples", "balls", "books", "cards", "coins", "flowers", "marbles", "stones")
STORIES = (
    ("{name} has {a} {things}. {other} brings {b} more. How many are there now?", "+"),
    ("{name} loses {b} of {a} {things}. How many are left?", "-"),
    ("{name} buys {a} boxes with {b} {things} each. How many is that together?", "*"),
    ("{name} packs {a} {things} into {b} boxes. How many are in each?", "/"),
)
_TERM = re.compile(r"(\d{1,9})([+*/-])(\d{1,9})")


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None  # the tool's name is its method's

    @vf.tool
    def calculator(self, expression: str) -> str:
        """arithmetic"""
        found = _TERM.fullmatch(expression.replace(" ", ""))
        if found is None:
            return "error: one operation of two numbers"
        a, sign, b = int(found[1]), found[2], int(found[3])
        if sign == "/":
            return str(Fraction(a, b)) if b else "error: division by zero"
        return str({"+": a + b, "-": a - b, "*": a * b}[sign])


class CalculatorData(vf.TaskData):
    answer: int


class CalculatorTask(vf.Task[CalculatorData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last number of the answer is the right one."""
        numbers = re.findall(r"-?\d+", trace.last_reply)
        return float(numbers[-1:] == [str(self.data.answer)])

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class CalculatorConfig(vf.TasksetConfig):
    num_tasks: int = 1000
    max_number: int = 99
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    def load(self) -> Iterator[CalculatorTask]:
        rng = random.Random(0)
        for _ in range(self.config.num_tasks):
            text, sign = rng.choice(STORIES)
            name, other = rng.sample(NAMES, 2)
            large, small = rng.randint(12, self.config.max_number), rng.randint(2, 11)
            if sign == "/":
                large -= large % small
            answers = {"+": large + small, "-": large - small, "*": large * small}
            prompt = text.format(
                name=name, other=other, things=rng.choice(THINGS), a=large, b=small
            )
            data = CalculatorData(
                system_prompt=SYSTEM_PROMPT,
                prompt=prompt,
                answer=answers.get(sign, large // small),
            )
            yield CalculatorTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        return [Calculator(config.tools)]


if __name__ == "__main__":
    Calculator.run()
