"""A batch script for Slurm's ``sbatch``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.scripts.job import EXPORT, Job, continued, shell_path

_WORD = re.compile(r"[^\W_-][\w.,:@+=-]*", re.ASCII)
_TIME = re.compile(r"[0-9]+(-[0-9]+)?(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_MEMORY = re.compile(r"[0-9]+[KMGT]?")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What only Slurm needs."""

    folder: str = ""
    """Where the run starts, on storage that all nodes share. Empty: where ``sbatch`` is called."""
    setup: str = ""
    """A shell command before it, such as ``source .venv/bin/activate``."""
    partition: str = ""
    """Slurm's partition; empty: the cluster's default."""
    account: str = ""
    """Slurm's account; empty: the cluster's default."""
    time: str = "24:00:00"
    """Limit of the job, as Slurm takes it. Shortly before it ends, the run writes a checkpoint."""
    memory: str = ""
    """Memory of each node, such as ``512G``; empty: the cluster's default."""


def slurm_script(job: Job, options: SlurmOptions) -> str:
    """Each job makes keys of its own, in a subfolder of ``job.keys``: its nodes are not known
    before.

    Raises:
        ConfigError: Slurm would not take an option.
    """
    _check(job, options)
    keys = shell_path(job.keys)
    make_keys = [
        "# Keys for the nodes of this job; all nodes must see the folder, and no other user.",
        f'rm -rf {keys}/"$SLURM_JOB_ID"-*  # of a start that was killed',
        f'KEYS={keys}/"$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"',
        "export KEYS",
        "trap 'rm -rf \"$KEYS\"' EXIT",
        "trap : TERM  # the end of srun comes first",
        'torchtitan-rl keys --hosts "${nodes[@]}" --output "$KEYS" --quiet',
        "",
    ]
    launcher = job.torchrun(
        rank_0="$((SLURM_NODEID == 0))",
        endpoint="$RANK_0",
        host='"$SLURMD_NODENAME"',
        run_id="$SLURM_JOB_ID",
        keys='"$KEYS"' if job.keys else "",
    )
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *job.header(
                "A Slurm script",
                "Start it with `sbatch FILE`; `sbatch --test-only FILE` only checks it. Submitted",
                "again, or requeued, it continues the run.",
            ),
            *_directives(job, options),
            "set -euo pipefail",
            *([f"cd {shell_path(options.folder)}"] if options.folder else []),
            *([options.setup] if options.setup else []),
            "",
            'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'export RANK_0="${nodes[0]}"',
            *(make_keys if job.keys else []),
            "# torchrun on each node; a launcher starts the processes of its node.",
            "run() {",
            f"  {EXPORT}",
            # Slurm signals its tasks alone: torchrun is to be the task.
            *continued([f"exec {launcher[0]}", *launcher[1:]], "  "),
            "}",
            "export -f run",
            "# srun does not take the number of cores from the job by itself.",
            'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 bash -c run',
            "",
        ]
    )


def _check(job: Job, options: SlurmOptions) -> None:
    words = {"name": job.name, "partition": options.partition, "account": options.account}
    for name, value in words.items():
        if value and not _WORD.fullmatch(value):
            raise ConfigError(
                f"--{name} is {value!r}: give one word of letters, digits and hyphens"
            )
    if options.memory and not _MEMORY.fullmatch(options.memory):
        raise ConfigError(f"--memory is {options.memory!r}: give a number such as 512G")
    if not _TIME.fullmatch(options.time):
        raise ConfigError(f"--time is {options.time!r}: give HOURS:MINUTES:SECONDS or DAYS-HOURS")


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    given = {
        "job-name": job.name,
        "nodes": job.num_hosts,
        "ntasks-per-node": 1,
        "gpus-per-node": job.devices or None,
        "cpus-per-task": job.cpus,
        "mem": options.memory,
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "output": "%x-%j.log",
        "open-mode": "append",
        # To the tasks, not the script: the run writes a checkpoint and ends.
        "signal": f"TERM@{job.grace_s}",
    }
    return [f"#SBATCH --{name}={value}" for name, value in given.items() if value] + [
        "#SBATCH --requeue"
    ]
