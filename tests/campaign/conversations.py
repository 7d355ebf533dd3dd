"""Cases of runs on conversations (`SupervisedController`): what they run, and what must hold.

Their steps depend on the configuration alone. So whatever fails, and however often, a run that
was resumed to its end has taken every step once, on the rows, references and weights of an
undisturbed run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tests.campaign.invariants import (
    Rule,
    Violation,
    can_be_resumed,
    ends,
    ends_in_a_named_way,
    fails_for_a_reason,
    leaves_nothing_behind,
    passes_the_audit,
    saves_what_it_has,
)
from tests.campaign.lives import Ending, Life
from tests.campaign.machine import Fault
from tests.support import conversations
from tests.support.conversations import conversation, pair, write_rows
from tests.support.simulated_faults import Fate
from tests.support.simulated_trainer import SimTrainer
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.config.supervised import DpoConfig, SftConfig
from torchtitan_rl.data.conversations import ExamplesConfig, PairsConfig
from torchtitan_rl.environments.supervised import HeldOutConfig
from torchtitan_rl.observability.sinks import RowKind, read_rows
from torchtitan_rl.orchestration.config import CheckpointConfig
from torchtitan_rl.orchestration.records import Recorder
from torchtitan_rl.training.config import TrainerConfig

_MAX_TOKENS = 60  # of an episode; those of long rows have more
_LONG = "Ann " * 80
_SAME = ("version", "tokens/generated", "tokens/trained", "tokens/discarded")  # in every row


@dataclass(frozen=True, kw_only=True)
class ConversationsPlan:
    """``beta``: of pairs; None: examples. Every ``long_rows``-th row is left out as too long; 0:
    none is. ``lives`` are disturbed ones; an undisturbed one follows."""

    beta: float | None = None
    rows: int = 5
    per_step: int = 2
    num_steps: int = 4
    long_rows: int = 0
    held_out_rows: int = 0
    held_out_every: int = 0
    checkpoint_every: int = 1
    train_s: float = 1.0
    checkpoint_s: float = 0.0
    trainer_timeout_s: float = 400.0
    seed: int = 0
    chance: int = 0
    lives: int = 1

    def config(self, root: Path) -> RunConfig:
        """Of the run whose folder is ``root``. Its files are next to it."""
        train, held_out = (root.parent / f"{name}.jsonl" for name in ("train", "held_out"))
        make = _example if self.beta is None else pair
        if not train.exists():
            rows = [make(n, self._answer(n)) for n in range(self.rows)]
            write_rows(train, rows)
            write_rows(held_out, [make(n, "") for n in range(50, 50 + self.held_out_rows)])
        data: dict[str, Any] = {
            "train": (str(train),),
            "per_step": self.per_step,
            "renderer": "chatml",
        }
        common: dict[str, Any] = {
            "policy": PolicyConfig(checkpoint="simulated"),
            "output_dir": root.parent,
            "name": root.name,
            "seed": self.seed,
            "num_steps": self.num_steps,
            "held_out": HeldOutConfig(
                files=(str(held_out),) if self.held_out_rows else (), every=self.held_out_every
            ),
            "trainer": TrainerConfig(
                max_episode_tokens=_MAX_TOKENS, step_timeout_s=self.trainer_timeout_s
            ),
            "checkpoint": CheckpointConfig(every=self.checkpoint_every),
        }
        if self.beta is None:
            return SftConfig(examples=ExamplesConfig(**data), **common).run()
        return DpoConfig(pairs=PairsConfig(**data), beta=self.beta, **common).run()

    def _answer(self, number: int) -> str:
        return _LONG if self.long_rows and number % self.long_rows == 1 else ""

    def simulation(self, root: Path, fate: Fate, recorder: Recorder) -> conversations.Life:
        trainer = SimTrainer(
            chance=random.Random(self.chance),
            step_s=self.train_s,
            write_s=self.checkpoint_s,
            timeout_s=self.trainer_timeout_s,
            fate=fate,
        )
        return conversations.Life(self.config(root), recorder=recorder, trainer=trainer)

    def describe(self) -> str:
        return ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))


def draw_conversations(seed: int) -> ConversationsPlan:
    rng = random.Random(f"conversations {seed}")
    return ConversationsPlan(
        beta=rng.choice([None, 0.1]),
        rows=rng.choice([3, 5, 8]),
        per_step=rng.randint(1, 4),
        num_steps=rng.randint(2, 7),
        long_rows=rng.choice([0, 0, 2, 3]),
        held_out_rows=rng.choice([0, 0, 2, 3]),
        held_out_every=rng.randint(0, 3),
        checkpoint_every=rng.choice([0, 1, 1, 2, 3]),
        train_s=rng.choice([0.0, 1.0, 5.0]),
        checkpoint_s=rng.choice([0.0, 0.5, 5.0]),
        seed=rng.randrange(1000),
        chance=rng.randrange(10**6),
        lives=rng.choice([1, 2, 2, 3, 4]),
    )


def takes_each_step_once(life: Life) -> Iterator[str]:
    """Over all lives, in order; only steps with a row that fits change the weights."""
    if life.ending is not Ending.SUCCESS or life.simulation is None:
        return
    steps = [record.step for record in life.timeline]
    if steps != list(range(1, life.plan.num_steps + 1)):
        yield f"records of {steps}, and {life.plan.num_steps} steps"
    num_updates = sum(record.tokens.trained > 0 for record in life.timeline)
    if life.simulation.trainer.version != num_updates:
        yield f"{life.simulation.trainer.version} optimizer steps, {num_updates} with tokens"


def equals_the_undisturbed_conversations(
    life: Life, undisturbed: Life, fired: list[Fault]
) -> list[Violation]:
    """Weights, with the references of pairs, and all rows of steps and evaluations. ``fired`` may
    be anything."""
    if {life.ending, undisturbed.ending} != {Ending.SUCCESS}:
        return []
    ours, theirs = (one.simulation.trainer.weights for one in (life, undisturbed))
    texts = [] if ours == theirs else [f"weights {ours:x}, not {theirs:x}"]
    rows, expected = _rows(life.root), _rows(undisturbed.root)
    texts += [
        f"{kind} row of step {step}: {rows.get((kind, step))}, not {expected.get((kind, step))}"
        for kind, step in sorted(rows.keys() | expected.keys())
        if rows.get((kind, step)) != expected.get((kind, step))
    ]
    return [Violation("equals_the_undisturbed_run", life.number, text) for text in texts]


def _rows(root: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows of steps and evaluations, without times."""
    rows = [line.row for line in read_rows(root / "metrics.jsonl")]
    return {
        (row["kind"], row["step"]): {
            name: value
            for name, value in row.items()
            if name in _SAME or (name.startswith("evaluation/") and not name.endswith("_s"))
        }
        for row in rows
        if row["kind"] in (RowKind.STEP, RowKind.EVALUATION)
    }


def _example(number: int, answer: str) -> dict[str, Any]:
    return {"messages": conversation(number, answer)}


CONVERSATION_RULES: tuple[Rule, ...] = (
    ends,
    ends_in_a_named_way,
    fails_for_a_reason,
    can_be_resumed,
    leaves_nothing_behind,
    passes_the_audit,
    saves_what_it_has,
    takes_each_step_once,
)
