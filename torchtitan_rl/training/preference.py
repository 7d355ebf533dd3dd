"""DPO, the loss of pairs of a chosen and a rejected continuation (Rafailov et al. 2023,
arXiv:2305.18290, eq. 7):

    L = -log sigmoid(m),  m = beta ((log p(y_w) - log p_ref(y_w)) - (log p(y_l) - log p_ref(y_l)))

averaged over the pairs of a step. The loss of a pair depends on two whole episodes, which may be in
different microbatches, on different ranks. But its gradient by the logprob of a token depends on
the token only by the sign of its episode: it is -beta sigmoid(-m) for the chosen one and
+beta sigmoid(-m) for the rejected one. So the logprobs are first computed without a gradient; the
step then takes the gradient of a sum over tokens with fixed weights, which can be split in any way.

Shapes: P pairs; 2 episodes of a pair, the chosen one first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """The loss of each pair, and its derivative by each token's logprob."""

    losses_P: npt.NDArray[np.float64]  # -log sigmoid(margin)
    weights_P2: npt.NDArray[np.float64]  # derivative of the mean loss by a token of the episode
    rewards_P2: npt.NDArray[np.float64]  # beta (log p - log p_ref)

    def metrics(self) -> dict[str, float]:
        """Compute metrics by name, as in the table of metrics."""
        margins_P = self.rewards_P2[:, 0] - self.rewards_P2[:, 1]
        return {
            "preference/accuracy": float((margins_P > 0).mean()),
            "preference/margin_mean": float(margins_P.mean()),
            "preference/chosen_reward_mean": float(self.rewards_P2[:, 0].mean()),
            "preference/rejected_reward_mean": float(self.rewards_P2[:, 1].mean()),
        }


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
