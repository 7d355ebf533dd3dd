"""The calculator agent as a `Task`. Its fields are command-line options of its configs.

The reward of a solution is 1 if the last number of the answer is right, even without a call; 0.3 if
the calculator showed the right number; 0.1 if a call had a result; otherwise 0. The partial rewards
give a gradient before the first right answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl import (
    Agent,
    AgentCall,
    AgentEnv,
    AgentHost,
    AgentResult,
    AgentTask,
    Dataset,
    Problem,
    RolloutConfig,
    RolloutEnv,
    Split,
)
from torchtitan_rl.experiments.calculator_agent.agent import Solution, solve
from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes, make_problem
from torchtitan_rl.experiments.procedural import ProceduralDataset, size_errors

if TYPE_CHECKING:
    import httpx

POLICY_DIR = Path(__file__).parent / "policy"  # the embedded policy, in Hugging Face format
_MAX_NUMBER = 1_000_000


@dataclass(frozen=True, kw_only=True)
class CalculatorAgentTask(AgentTask):
    """Solve word problems of one or two operations by calling a calculator."""

    two_operations: float = 0.5
    """Share of problems with two operations; the others have one."""
    max_number: int = 99
    """Largest number in a problem."""
    max_turns: int = 4
    """Turns after which the agent gives up."""
    num_train_problems: int = 4096
    """Problems of one epoch."""
    num_validation_problems: int = 1024
    """Problems of the validation set."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        train = split == "train"
        sizes = ProblemSizes(two_operations=self.two_operations, max_number=self.max_number)
        return ProceduralDataset(
            split,
            seed=seed,
            num_problems=self.num_train_problems if train else self.num_validation_problems,
            make=partial(make_problem, sizes=sizes),
        )

    def agent(self, problem: Problem) -> Agent:
        return self.run

    async def run(
        self, given: AgentCall, transport: httpx.AsyncBaseTransport | None = None
    ) -> AgentResult:
        """Let the agent solve its problem, and score the solution."""
        import httpx
        from openai import AsyncOpenAI

        # Making a TLS context takes 20 ms; the endpoint is plain HTTP on this machine.
        http_client: Any = httpx.AsyncClient(transport=transport, verify=False)
        async with AsyncOpenAI(
            base_url=given.base_url, api_key=given.api_key, http_client=http_client
        ) as client:
            data = given.problem.data
            solution = await solve(
                client, model=given.model, question=data["text"], max_turns=self.max_turns
            )
        return AgentResult(
            reward=score(solution, data["answer"]),
            metrics={
                "right_answers": float(is_right(solution, data["answer"])),
                "calls": float(solution.num_calls),
            },
            messages=solution.messages,
        )

    def agent_environment(
        self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig, host: AgentHost
    ) -> RolloutEnv:
        """The agent's environment, which also compares tokens: see `token_audit`."""
        import httpx

        from torchtitan_rl.experiments.calculator_agent.token_audit import (
            AuditedEnv,
            TokenIdTransport,
        )

        transport = TokenIdTransport(httpx.AsyncHTTPTransport(verify=False))
        env = AgentEnv(
            agent=partial(self.run, transport=transport),
            problem=problem,
            host=host,
            grace_s=min(self.grace_s, limits.step_timeout_s / 2),
            reward_at_limit=self.reward_at_limit,
            decode=tokenizer.decode,
        )
        return AuditedEnv(env, transport.turns)

    def errors(self) -> list[str]:
        found = []
        if self.replayable:
            found.append(
                "task.replayable is True: this task compares the tokens of one life of its agent; "
                "give False"
            )
        if not 0 <= self.two_operations <= 1:
            found.append(f"task.two_operations={self.two_operations}: must be between 0 and 1")
        if not 9 <= self.max_number <= _MAX_NUMBER:
            found.append(f"task.max_number={self.max_number}: must be 9 to {_MAX_NUMBER}")
        if self.max_turns < 1:
            found.append(f"task.max_turns={self.max_turns}: must be 1 or more")
        return [*found, *size_errors(self)]


RIGHT_ANSWER = 1.0
RIGHT_RESULT = 0.3
VALID_CALL = 0.1

_MAX_DIGITS = 100
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def score(solution: Solution, right_answer: int) -> float:
    """Return the reward of a solution."""
    if is_right(solution, right_answer):
        return RIGHT_ANSWER
    if str(right_answer) in solution.results:
        return RIGHT_RESULT
    return VALID_CALL if solution.results else 0.0


def is_right(solution: Solution, right_answer: int) -> bool:
    """Whether the last number of the answer is ``right_answer``."""
    numbers = _NUMBER.findall(solution.answer or "")
    if not numbers or len(numbers[-1]) > _MAX_DIGITS:
        return False
    return Fraction(numbers[-1]) == right_answer
