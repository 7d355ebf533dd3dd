"""Publishing of weights to other hosts by all trainer ranks: each offers what it holds.

Nothing is gathered on rank 0 but where the parts are.

Invariant: a version that a rank could not offer is never visible, and every rank returns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.handle import RemoteMemoryHandle, RemoteSource, SharedMemoryHandle
from torchtitan_rl.weights.image import TensorPart, plan_image
from torchtitan_rl.weights.remote import PartPublisher


class RemotePublisher:
    """One on each rank."""

    def __init__(self, publisher: PartPublisher) -> None:
        self._publisher = publisher

    def publish(
        self,
        version: int,
        parts: Mapping[str, TensorPart],
        *,
        keep: frozenset[int],
        shared: SharedMemoryHandle | None,
    ) -> RemoteMemoryHandle | None:
        """Returns the handle on rank 0, None elsewhere. Collective.

        Args:
            parts: of this rank; rank 0's name all tensors.
            shared: the same version in shared memory, on rank 0 where it is there.

        Raises:
            WeightSyncError: on rank 0, if a rank could not offer its parts.
        """
        answers = _gathered(self._offer(version, parts, keep))
        if answers is None:
            return None
        errors = [f"rank {rank}: {one}" for rank, one in enumerate(answers) if isinstance(one, str)]
        if errors:
            raise WeightSyncError(f"version {version} cannot be offered: {'; '.join(errors)}")
        return RemoteMemoryHandle(
            layout=plan_image({name: part.whole() for name, part in parts.items()}, version),
            sources=tuple(one for one in answers if isinstance(one, RemoteSource)),
            keep=keep,
            shared=shared,
        )

    def close(self) -> None:
        self._publisher.close()

    def _offer(
        self, version: int, parts: Mapping[str, TensorPart], keep: frozenset[int]
    ) -> RemoteSource | str | None:
        """The source, or the error: nothing is raised, since rank 0 waits for the answer."""
        try:
            return self._publisher.publish(version, parts, keep=keep)
        except Exception as error:
            return repr(error)


def _gathered(answer: RemoteSource | str | None) -> list[RemoteSource | str | None] | None:
    """Those of all ranks on rank 0, None elsewhere. Collective."""
    if dist.get_world_size() == 1:
        return [answer]
    answers: list[RemoteSource | str | None] = [None] * dist.get_world_size()
    is_first = dist.get_rank() == 0
    dist.gather_object(answer, answers if is_first else None, dst=0)
    return answers if is_first else None
