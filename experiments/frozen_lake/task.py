"""FrozenLake as a `Task`: each problem has another map, which is shown after each move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl import GymnasiumTask

_MAX_SIZE = 32
_MIN_FROZEN = 0.5  # with less, a map with a way to the goal takes long to find
POLICY_DIR = Path(__file__).parent / "policy"  # the embedded policy, in Hugging Face format


@dataclass(frozen=True, kw_only=True)
class FrozenLakeTask(GymnasiumTask):
    """Walk over a frozen lake (F) from the start (S) to the goal (G), around the holes (H)."""

    size: int = 4
    """Rows and columns of a map."""
    frozen: float = 0.8
    """Chance of a place to be frozen; there is always a way to the goal."""

    def make(self, seed: int) -> Any:
        import gymnasium
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        desc = generate_random_map(size=self.size, p=self.frozen, seed=seed)
        return gymnasium.make(self.env_id, desc=desc, **self.kwargs)

    def describe(self, env: Any, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the map, without the line that names the last move."""
        lines = super().describe(env, observation, info).split("\n")
        return "\n".join(lines[-self.size :])

    def errors(self) -> list[str]:
        if not 2 <= self.size <= _MAX_SIZE:
            return [f"task.size={self.size}: must be 2 to {_MAX_SIZE}"]
        if not _MIN_FROZEN <= self.frozen <= 1:
            return [f"task.frozen={self.frozen}: must be {_MIN_FROZEN} to 1"]
        return super().errors()


TASK = FrozenLakeTask(
    env_id="FrozenLake-v1",
    kwargs={"render_mode": "ansi", "is_slippery": False, "max_episode_steps": 10},
    action_names=("left", "down", "right", "up"),
    system="",
    prompt="{observation}",
    invalid_reply="{observation}",
    answer_pattern="",  # the whole completion is the action
    renderer="chatml",
)
