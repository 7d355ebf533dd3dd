"""The calculator agent as a `Task`; its fields are command-line options of its configs."""

from __future__ import annotations

from dataclasses import dataclass
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
from torchtitan_rl.experiments.calculator_agent.agent import solve
from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes, make_problem
from torchtitan_rl.experiments.calculator_agent.scoring import is_right, score
from torchtitan_rl.experiments.procedural import MAX_PROBLEMS, ProceduralDataset

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
        for name in ("num_train_problems", "num_validation_problems"):
            if not 1 <= getattr(self, name) <= MAX_PROBLEMS:
                found.append(f"task.{name}={getattr(self, name)}: must be 1 to {MAX_PROBLEMS}")
        return found
