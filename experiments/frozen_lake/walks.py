"""Walks to imitate: the shortest way to the goal, with moves at random."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

from torchtitan_rl.experiments.frozen_lake.task import FrozenLakeTask

_STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def walk(
    task: FrozenLakeTask, seed: int, *, carelessness: float, rng: random.Random
) -> Iterator[tuple[str, str]]:
    """What the policy is shown and what it answers, until the game ends.

    ``carelessness`` is the chance of each move to be any of the four.
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
    """The first moves of all shortest ways to the goal.

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
    """Of each place that is no hole, to the goal."""
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
