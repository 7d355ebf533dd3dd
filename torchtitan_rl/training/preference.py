"""DPO, the loss of pairs of a chosen and a rejected continuation (Rafailov et al. 2023,
arXiv:2305.18290, eq. 7):

    L = -log sigmoid(m),  m = beta ((log p(y_w) - log p_ref(y_w)) - (log p(y_l) - log p_ref(y_l)))

averaged over the pairs of a step. The loss of a pair depends on two whole episodes, which may be in
different microbatches, on different ranks. But its gradient by the logprob of a token depends on
the token only by the sign of its episode: it is -beta sigmoid(-m) for the chosen one and
+beta sigmoid(-m) for the rejected one. So the logprobs are first computed without a gradient; the
step then takes the gradient of a sum over tokens with fixed weights, which can be split in any way.

In `torchtitan-rl dpo` a continuation is one episode. In a run with rollouts (online DPO: Guo et al.
2024, arXiv:2402.04792) it is all episodes of a rollout, and a pair is of one group.

Shapes: P pairs; 2 continuations of a pair, the chosen one first; E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchtitan_rl.training.batch import TrainingBatch, sums_by_episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """The loss of each pair, and its derivative by each token's logprob."""

    losses_P: npt.NDArray[np.float64]  # -log sigmoid(margin)
    weights_P2: npt.NDArray[np.float64]  # derivative of the mean loss by a token of the episode
    rewards_P2: npt.NDArray[np.float64]  # beta (log p - log p_ref)


def preference_metrics(rewards_P2: npt.NDArray[np.float64]) -> dict[str, float]:
    """Compute metrics by name, as in the table of metrics, from `Preferences.rewards_P2`."""
    margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    return {
        "preference/pairs": float(len(margins_P)),
        "preference/accuracy": float((margins_P > 0).mean()),
        "preference/margin_mean": float(margins_P.mean()),
        "preference/chosen_reward_mean": float(rewards_P2[:, 0].mean()),
        "preference/rejected_reward_mean": float(rewards_P2[:, 1].mean()),
    }


def halves_of(batch: TrainingBatch, selected_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return [E]: 2 p for the episodes of the chosen continuation of pair p, 2 p + 1 for those of
    the rejected one, and -1 for episodes without a selected token. The pairs are those of the
    groups, by the signs of the advantages (``rollout.advantage pair``).

    Raises:
        ValueError: the selected tokens of a group are not those of a pair.
    """
    sizes_E = sums_by_episode(batch, np.ones_like(batch.logprobs), selected_N)
    signs_E = sums_by_episode(batch, batch.advantages, selected_N)
    halves_E = np.full(batch.num_episodes, -1, dtype=np.int64)
    is_in_E = sizes_E > 0
    _, pairs = np.unique(batch.groups[is_in_E], return_inverse=True)
    halves_E[is_in_E] = 2 * pairs + (signs_E[is_in_E] < 0)
    num_halves = len(np.unique(halves_E[is_in_E]))
    if not signs_E[is_in_E].all() or num_halves != 2 * (pairs.max(initial=-1) + 1):
        raise ValueError("a group is no pair of rollouts: use rollout.advantage pair")
    return halves_E


def preferences(
    logprobs_P2: npt.NDArray[np.float64], references_P2: npt.NDArray[np.float64], *, beta: float
) -> Preferences:
    """Compute the loss of pairs from the logprobs of whole continuations.

    >>> equal = np.zeros((1, 2))
    >>> result = preferences(equal, equal, beta=0.1)
    >>> print(f"{result.losses_P[0]:.4f}", result.weights_P2)
    0.6931 [[-0.05  0.05]]
    """
    rewards_P2 = beta * (logprobs_P2 - references_P2)
    margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    pull_P = beta * 0.5 * (1.0 - np.tanh(0.5 * margins_P)) / len(margins_P)  # sigmoid(-m)
    return Preferences(
        losses_P=np.logaddexp(0.0, -margins_P),
        weights_P2=np.stack([-pull_P, pull_P], axis=1),
        rewards_P2=rewards_P2,
    )
