"""Search as a `Task`. Its fields are command-line options of every config that uses it."""

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
    ToolEnv,
    make_renderer,
)
from torchtitan_rl.experiments.procedural import MAX_PROBLEMS, ProceduralDataset
from torchtitan_rl.experiments.search.env import SearchTools, index_of, make_problem, score

POLICY_DIR = Path(__file__).parent / "policy"  # the embedded policy, in Hugging Face format


@dataclass(frozen=True, kw_only=True)
class SearchTask(Task):
    """Answer questions about made-up people and towns by searching documents about them."""

    two_searches: float = 0.5
    """Share of questions that take two searches: who lives where, then what is there."""
    num_results: int = 1
    """Documents that a search returns at most."""
    num_worlds: int = 64
    """Worlds of each split, with 40 documents each; a problem is about one of them."""
    num_train_problems: int = 4096
    """Problems of one epoch."""
    num_validation_problems: int = 1024
    """Problems of the validation set."""
    renderer: RendererKind = "auto"
    """How messages become tokens; ``auto`` chooses the renderer that fits the model."""
    thinking: Thinking = "off"
    """Of Qwen3: ``off`` prefills an empty thought, ``keep`` and ``strip`` let it think."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        train = split == "train"
        return ProceduralDataset(
            split,
            seed=seed,
            num_problems=self.num_train_problems if train else self.num_validation_problems,
            make=partial(make_problem, num_worlds=self.num_worlds, two_searches=self.two_searches),
        )

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        renderer = make_renderer(tokenizer, kind=self.renderer, thinking=self.thinking)
        data = problem.data

        async def search(query: str) -> list[str]:
            return index_of(data["world"]).find(query, self.num_results)

        env = ToolEnv(
            [{"role": "user", "content": data["question"]}],
            SearchTools(search),
            partial(score, answer=data["answer"]),
            replays=True,
        )
        return MessageTokenEnv(env, renderer)

    def errors(self) -> list[str]:
        found = []
        if not 0 <= self.two_searches <= 1:
            found.append(f"task.two_searches={self.two_searches}: must be between 0 and 1")
        if self.num_results < 1:
            found.append(f"task.num_results={self.num_results}: must be 1 or more")
        for name in ("num_worlds", "num_train_problems", "num_validation_problems"):
            if not 1 <= getattr(self, name) <= MAX_PROBLEMS:
                found.append(f"task.{name}={getattr(self, name)}: must be 1 to {MAX_PROBLEMS}")
        try:
            import bm25s  # noqa: F401 - whether it is there
        except ImportError:
            found.append("task: it needs bm25s; pip install 'torchtitan-rl[tasks]'")
        return found
