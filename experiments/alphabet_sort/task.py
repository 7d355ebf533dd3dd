"""Alphabet sort as a `Task`. Its fields are command-line options of every config that uses it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_rl import (
    Dataset,
    MessageTokenEnv,
    Problem,
    RendererKind,
    RolloutConfig,
    Split,
    Task,
    Thinking,
    TokenEnv,
    make_renderer,
)
from torchtitan_rl.experiments.alphabet_sort.env import (
    NAMES,
    AlphabetSortEnv,
    ProblemSizes,
    make_problem,
)
from torchtitan_rl.experiments.procedural import ProceduralDataset, size_errors

POLICY_DIR = Path(__file__).parent / "policy"  # the embedded policy, in Hugging Face format


@dataclass(frozen=True, kw_only=True)
class AlphabetSortTask(Task):
    """Sort names alphabetically. In each further turn, merge the new names into the list, and mark
    them.

    For each problem, the number of turns and the numbers of names are drawn from the ranges below,
    minimum and maximum included.
    """

    min_turns: int = 1
    """Fewest turns of a problem."""
    max_turns: int = 3
    """Most turns of a problem."""
    min_names: int = 2
    """Fewest names of one turn."""
    max_names: int = 4
    """Most names of one turn."""
    power: float = 2.0
    """The score of a turn is its similarity to the right answer to this power."""
    num_train_problems: int = 4096
    """Problems of one epoch."""
    num_validation_problems: int = 1024
    """Problems of the validation set."""
    renderer: RendererKind = "auto"
    """How messages become tokens; ``auto`` chooses the renderer that fits the model."""
    thinking: Thinking = "off"
    """Of Qwen3: ``off`` prefills an empty thought, ``keep`` leaves earlier thoughts in the history,
    ``strip`` drops them at each user message."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        train = split == "train"
        return ProceduralDataset(
            split,
            seed=seed,
            num_problems=self.num_train_problems if train else self.num_validation_problems,
            make=partial(make_problem, sizes=self._sizes()),
        )

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        renderer = make_renderer(tokenizer, kind=self.renderer, thinking=self.thinking)
        return MessageTokenEnv(AlphabetSortEnv(problem.data["turns"], power=self.power), renderer)

    def errors(self) -> list[str]:
        found = []
        for low, high in (("min_turns", "max_turns"), ("min_names", "max_names")):
            least, most = getattr(self, low), getattr(self, high)
            if not 1 <= least <= most:
                found.append(
                    f"task.{low}={least}, task.{high}={most}: must be 1 or more and in this order"
                )
        if self.max_turns * self.max_names > len(NAMES):
            found.append(
                f"task.max_turns={self.max_turns} x task.max_names={self.max_names}: "
                f"there are only {len(NAMES)} names; lower one of them"
            )
        if not self.power > 0:
            found.append(f"task.power={self.power}: must be above 0 (1 is the plain similarity)")
        return [*found, *size_errors(self)]

    def _sizes(self) -> ProblemSizes:
        return ProblemSizes(
            min_turns=self.min_turns,
            max_turns=self.max_turns,
            min_names=self.min_names,
            max_names=self.max_names,
        )
