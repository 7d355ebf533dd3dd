"""The task of all agent libraries. Its fields are command-line options of its configs."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from torchtitan_rl import Agent, AgentCall, AgentResult, AgentTask, Dataset, Problem, Split
from torchtitan_rl.experiments.agent_libraries.exercise import Exercise, make_problem
from torchtitan_rl.experiments.agent_libraries.libraries import (
    LIBRARIES,
    PACKAGES,
    Library,
    load,
)
from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes
from torchtitan_rl.experiments.procedural import ProceduralDataset, size_errors

POLICY_DIR = Path(__file__).parent / "policy"  # the embedded policy, in Hugging Face format
SIZES = ProblemSizes(two_operations=0.3, max_number=99)


@dataclass(frozen=True, kw_only=True)
class AgentLibrariesTask(AgentTask):
    """Ask for the number that a word problem lacks, and solve it with a calculator."""

    libraries: tuple[Library, ...] = LIBRARIES
    """Libraries whose agents solve the problems: each problem has one of them, in turn."""
    num_train_problems: int = 4096
    """Problems of one epoch."""
    num_validation_problems: int = 1024
    """Problems of the validation set."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        train = split == "train"
        return ProceduralDataset(
            split,
            seed=seed,
            num_problems=self.num_train_problems if train else self.num_validation_problems,
            make=partial(make_problem, sizes=SIZES),
        )

    def agent(self, problem: Problem) -> Agent:
        index = int(problem.problem_id.rpartition("/")[2])
        return partial(run, self.libraries[index % len(self.libraries)])

    def errors(self) -> list[str]:
        found = []
        if not self.libraries:
            found.append("task.libraries is empty: give one or more")
        missing = [library for library in self.libraries if not find_spec(PACKAGES[library])]
        if missing:
            found.append(
                f"task.libraries has {', '.join(missing)}, which is not installed: "
                "pip install 'torchtitan-rl[agents]'"
            )
        return [*found, *size_errors(self)]


async def run(library: Library, given: AgentCall) -> AgentResult:
    """Let the agent of ``library`` solve the problem, and score its last message."""
    exercise = Exercise(problem=given.problem.data)
    solve = load(library)
    if inspect.iscoroutinefunction(solve):
        answer = await solve(given, exercise)
    else:
        answer = await asyncio.to_thread(solve, given, exercise)
    return exercise.result(answer, library=library)
