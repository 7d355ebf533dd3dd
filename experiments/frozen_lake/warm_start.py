"""Makes the embedded policy of FrozenLake: a small Qwen3, trained on demonstrations.

    python -m torchtitan_rl.experiments.frozen_lake.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16). By default it replaces the policy in this package, which
was made with these defaults. Training uses shortest ways to the goal first, then ways with random
moves (see `experiments.tiny_policy`), on maps that reinforcement learning does not use.

Each place of a map and each move is a token.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from tokenizers import Tokenizer

from torchtitan_rl import Episode, make_renderer
from torchtitan_rl.experiments.frozen_lake.task import POLICY_DIR, TASK, FrozenLakeTask
from torchtitan_rl.experiments.tiny_policy import (
    CHATML,
    ModelSize,
    WarmStart,
    build_word_backend,
    demonstration,
    warm_start,
    with_chat_template,
)

_FIRST_SEED = 1_000_000
# 8 moves fit into `row_len` tokens.
_LESSONS = replace(TASK, kwargs={**TASK.kwargs, "max_episode_steps": 8})


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    right_steps: int = 250  # steps on shortest ways
    careless_steps: int = 50  # steps on ways with random moves
    decay_steps: int = 100
    demonstrations_per_step: int = 24
    carelessness: float = 0.3  # probability that a move is drawn from all four


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="chatml")

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        seed = _FIRST_SEED + number
        carelessness = config.carelessness if is_careless else 0.05
        moves = walk(_LESSONS, seed, carelessness=carelessness, rng=rng)
        turns = [([{"role": "user", "content": seen}], answer) for seen, answer in moves]
        return demonstration(str(seed), turns, renderer=renderer, tokenizer=tokenizer)

    size = ModelSize(hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, head_dim=32)
    warm_start(config, tokenizer, size, demonstrate)


# Line breaks; a word with the space before it; a place of the map, in brackets where the player is;
# other signs; other white space.
_PIECE = r"\n+| ?[a-z]+|\[[SFHG]\]|[SFHG]| ?[^\sa-zSFHG]+|\s"

_COVERED = "system\nuser\nassistant\n" + "left down right up".replace(" ", "\n") + "\nSFHG[S][F][G]"


def build_tokenizer() -> Any:
    """Build the `transformers` tokenizer of the policy; the result is always the same."""
    return with_chat_template(build_backend(), CHATML)


def build_backend() -> Tokenizer:
    return build_word_backend(_COVERED, piece=_PIECE)


_STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def walk(
    task: FrozenLakeTask, seed: int, *, carelessness: float, rng: random.Random
) -> Iterator[tuple[str, str]]:
    """Yield each map that the policy is shown, and its answer, until the game ends.

    ``carelessness`` is the probability that a move is drawn from all four.
    """
    env = task.make(seed)
    observation, info = env.reset(seed=seed)
    has_ended = False
    while not has_ended:
        shown = task.describe(env, observation, info)
        is_careless = rng.random() < carelessness
        move = rng.choice(sorted(_STEPS)) if is_careless else rng.choice(best_moves(shown))
        yield shown, move
        observation, _, is_over, is_cut, info = env.step(task.action_names.index(move))
        has_ended = is_over or is_cut
    env.close()


def best_moves(shown: str) -> list[str]:
    """Return the first moves of all shortest ways to the goal.

    >>> best_moves("[S]F\\nHG")
    ['right']
    """
    rows = [line.replace("[", "").replace("]", "") for line in shown.split("\n")]
    player = next(
        (row, line.index("[")) for row, line in enumerate(shown.split("\n")) if "[" in line
    )
    distance = _distances(rows)
    near = {
        move: distance[place]
        for move, (down, right) in _STEPS.items()
        if (place := (player[0] + down, player[1] + right)) in distance
    }
    return [move for move in near if near[move] == min(near.values())]


def _distances(rows: list[str]) -> dict[tuple[int, int], int]:
    """Return the distance to the goal of each place that is not a hole."""
    goal = next((row, line.index("G")) for row, line in enumerate(rows) if "G" in line)
    found, waiting = {goal: 0}, deque([goal])
    while waiting:
        row, column = waiting.popleft()
        for down, right in _STEPS.values():
            place = (row + down, column + right)
            if not (0 <= place[0] < len(rows) and 0 <= place[1] < len(rows[0])):
                continue
            if place not in found and rows[place[0]][place[1]] != "H":
                found[place] = found[row, column] + 1
                waiting.append(place)
    return found


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
