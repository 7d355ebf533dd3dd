"""The exceptions of the package, as a tree that users can catch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torchtitan_rl.types import Completion


class TorchtitanRLError(Exception):
    """Base class of all errors that this package raises on purpose."""


class ConfigError(TorchtitanRLError):
    """One or more errors in a configuration. Each message says what is wrong, where, and how to fix
    it."""

    def __init__(self, errors: str | list[str]) -> None:
        self.errors = [errors] if isinstance(errors, str) else list(errors)
        super().__init__("\n".join(self.errors))


class HostsBusyError(ConfigError):
    """The only error is that workers of ``launch.attach`` serve other runs."""

    def __init__(self, errors: str | list[str], workers: Sequence[str] = ()) -> None:
        super().__init__(errors)
        self.workers = tuple(workers)  # their addresses


class GenerationError(TorchtitanRLError):
    """A request could not be completed."""


class InvalidRequestError(GenerationError):
    """The router, the engine loop or the engine refused a request; no other request fails."""


class RequestGivenUpError(InvalidRequestError):
    """The engine accepted a request and could not complete it; no other request fails.

    ``completion`` contains the tokens sampled before the failure.
    """

    def __init__(self, message: str, completion: Completion) -> None:
        super().__init__(message, completion)
        self.completion = completion

    def __str__(self) -> str:
        return str(self.args[0])


class ReplicaError(GenerationError):
    """The replica of a request was closed, has failed or has died.

    ``silent_s``: the seconds from the last sign of life until the loss was seen, if known.
    """

    def __init__(self, *args: object, silent_s: float | None = None) -> None:
        super().__init__(*args)
        self.silent_s = silent_s


class ProcessLostError(ReplicaError):
    """A process, or the actor in it, has died."""


class ProcessEndedError(ProcessLostError):
    """A process has ended."""


class ProcessStoppedError(ProcessLostError):
    """A process was stopped (SIGSTOP) and not continued."""


class HostLostError(ReplicaError):
    """The host of a part is lost."""


class HostLeftError(HostLostError):
    """The host of a part was told to end, and the run has left it."""


class EngineMemoryError(ReplicaError):
    """An engine cannot start with the memory that it has. The message names the options to
    change."""


class LoopClosedError(ReplicaError):
    """The engine loop was asked to close."""


class LoopFailedError(ReplicaError):
    """The engine loop failed with the error in ``__cause__``; all its requests fail with it."""


class StepFailedError(LoopFailedError):
    """The engine loop failed while it stepped its requests, so one of them may be the cause."""


class LoopStalledError(StepFailedError):
    """The engine loop has requests and has made no progress with them for too long."""


class WeightSyncError(TorchtitanRLError):
    """Weights could not be published, fetched or swapped. The message names the version and the
    replica."""


class TrainerLostError(TorchtitanRLError):
    """A trainer process has died; the run can continue from its newest checkpoint."""


class DeviceMemoryError(TrainerLostError):
    """A training step needs more memory than its device has. The message names the options to
    lower, in order."""


class EndpointLostError(TorchtitanRLError):
    """The process of the HTTP endpoint did not start, or has died."""


class CheckpointError(TorchtitanRLError):
    """A checkpoint could not be written, or is damaged. The message names the checkpoint and the
    reason."""


class OutputError(TorchtitanRLError):
    """An output file (metrics, rollouts) could not be written. The message names the file and the
    reason."""


class RunTakenOverError(OutputError):
    """This process no longer owns the run's folder, and writes nothing more there.

    Either another process has taken the folder over, because this process did not renew its lease
    for a while (it was stopped, or could not reach its storage); or the lease was removed, so that
    another process may own the folder. In the second case ``successor`` is empty.
    """

    def __init__(self, run_dir: Path, successor: str) -> None:
        super().__init__(
            f"{successor} has taken over {run_dir}, because this process did not answer for a "
            "while; nothing more is written there"
            if successor
            else f"the entry of this process in {run_dir}/run.lease was removed, so another "
            "process may own the folder; nothing more is written there. If none runs there, "
            "resume the run"
        )
        self.successor = successor


class DivergedError(TorchtitanRLError):
    """Loss or gradient is NaN or Inf; no weights of this step are published or saved."""


class NothingTrainedError(TorchtitanRLError):
    """A run has nothing to train on: its rollouts fail, or all its groups are skipped."""


class TeacherError(TorchtitanRLError):
    """A teacher did not score a rollout. The run can be resumed, and scores the rollout again."""


class DeadlineError(TorchtitanRLError):
    """A wait reached its deadline. The message names what was waited for."""


class GenerationTimeoutError(GenerationError, DeadlineError):
    """A request was not completed by its deadline."""


def one_line(error: BaseException) -> str:
    """Describe an error in one line, for a message; of an exception group, its first error.

    >>> one_line(ValueError("not\\na number"))
    'ValueError: not a number'
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        message = str(error)
    except Exception:  # its class is user code, whose __str__ raises
        message = "<its message cannot be made>"
    return " ".join(f"{type(error).__name__}: {message}".split())
