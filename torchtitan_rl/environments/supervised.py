"""The task of a run without rollouts: ``torchtitan-rl sft`` and ``torchtitan-rl dpo``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.bounds import Count
from torchtitan_rl.data.conversations import Conversations, ExamplesConfig, PairsConfig, rows_of
from torchtitan_rl.data.rows import DataError, contents_of
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.rollout.task import Dataset, Split, Task

_MAX_CHECKED = 4096  # rows that are rendered before the run


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """Evaluation of the loss on files that are not trained on: before the first step, every
    ``every`` steps, and at the end."""

    files: tuple[str, ...] = ()
    """Files like those that are trained on. Empty: nothing is evaluated."""
    every: Count = 50
    """Number of steps between two evaluations; 0 evaluates only before and after the run."""
    num_rows: Count = 256
    """Number of rows, the first of the files; 0 takes all."""

    def resume_identity(self) -> Mapping[str, Any]:
        return contents_of(self, "files")


@dataclass(frozen=True, kw_only=True)
class SupervisedTask(Task):
    """Conversations to imitate, or with ``beta`` pairs of a chosen and a rejected answer."""

    data: ExamplesConfig | PairsConfig
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    beta: float | None = None

    @property
    def section(self) -> str:
        """The name of the section of the configuration that has the files."""
        return "examples" if isinstance(self.data, ExamplesConfig) else "pairs"

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        return rows_of(self.data.train, seed=seed, shuffle=self.data.shuffle)

    def conversations(self, tokenizer: Any, *, seed: int, max_tokens: int) -> Conversations:
        """Open the files that are trained on."""
        data, shuffle = self.data, self.data.shuffle
        return Conversations(
            data, data.train, tokenizer, seed=seed, shuffle=shuffle, max_tokens=max_tokens
        )

    def held_out_conversations(self, tokenizer: Any, *, max_tokens: int) -> Conversations | None:
        """Open the files of the evaluation; None without files."""
        if not self.held_out.files:
            return None
        options: dict[str, Any] = {"seed": 0, "shuffle": False, "prefix": "held_out/"}
        files = self.held_out.files
        return Conversations(self.data, files, tokenizer, max_tokens=max_tokens, **options)

    def errors(self) -> list[str]:
        if not self.data.train:
            return [f"{self.section}.train is empty: give a file of conversations"]
        found = []
        for name, files in {
            f"{self.section}.train": self.data.train,
            "held_out.files": self.held_out.files,
        }.items():
            try:
                if files and not rows_of(files, seed=0, shuffle=False).num_rows:
                    found.append(f"{name} is {', '.join(files)}: there is no row in it")
            except ConfigError as error:
                found.append(f"{name}: {error}")
        return found

    def row_errors(
        self, tokenizer: Any, *, seed: int, num_steps: int, max_tokens: int
    ) -> tuple[list[str], list[str]]:
        """Render the first rows that the run will use, and those of the evaluation. Returns errors,
        and notes about rows that are too long. `errors` must be empty."""
        errors: list[str] = []
        notes: list[str] = []
        try:
            train = self.conversations(tokenizer, seed=seed, max_tokens=max_tokens)
            held_out = self.held_out_conversations(tokenizer, max_tokens=max_tokens)
        except ConfigError as error:
            return error.errors, []
        used = min(num_steps * self.data.per_step, train.rows.num_rows, _MAX_CHECKED)
        found = [(f"{self.section}.train", train, used)]
        if held_out is not None:
            size = held_out.rows.num_rows
            found.append(("held_out.files", held_out, min(self.held_out.num_rows or size, size)))
        for name, conversations, number in found:
            try:
                fitting, too_long = conversations.read(range(number))
            except DataError as error:
                errors.append(f"{name}: {error}")
                continue
            if too_long:
                longest, number = max(one.longest for one in too_long), len(fitting + too_long)
                what = (
                    f"{len(too_long)} of {number} rows are longer than trainer.max_episode_tokens "
                    f"({max_tokens}); the longest has {longest} tokens"
                )
                if self.data.too_long == "refuse" or not fitting:
                    errors.append(f"{name}: {what}: raise that, or leave these rows out")
                else:
                    notes.append(f"warning: {name}: {what}: they are left out")
        return errors, notes
