"""A manifest for Kubernetes: a headless Service, which gives the pods names, and an indexed Job."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.scripts.job import EXPORT, Job, continued, is_plain, shell_path, text

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")
_KEYS = "/keys"
_FILES = ("cert.pem", "key.pem", "ca.pem")


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """What only Kubernetes needs."""

    image: str = "torchtitan-rl:latest"
    """An image with this package, CONFIG and the policy."""
    storage: str = "outputs"
    """A PersistentVolumeClaim that all nodes can write (ReadWriteMany), mounted at /outputs."""
    memory: str = "64Gi"
    """Memory of each pod, its shared memory included."""
    shared_memory: str = "16Gi"
    """Room for weights in /dev/shm, a part of the memory."""


def kubernetes_manifest(job: Job, options: KubernetesOptions) -> str:
    """The pod of index 2 is ``NAME-2.NAME`` to the others.

    Raises:
        ConfigError: the name cannot be that of pods, or a size is none.
    """
    if not _NAME.fullmatch(job.name):
        raise ConfigError(
            f"--name is {job.name!r}: give at most 52 small letters, digits and hyphens, of which "
            "the first is a letter and the last not a hyphen"
        )
    for name, size in (("memory", options.memory), ("shared-memory", options.shared_memory)):
        if not _QUANTITY.fullmatch(size):
            raise ConfigError(f"--{name} is {size!r}: give a quantity such as 64Gi")
    host = f'"{job.name}-$JOB_COMPLETION_INDEX.{job.name}"'
    launcher = job.with_outputs("/outputs").torchrun(
        rank_0="$((JOB_COMPLETION_INDEX == 0))",
        endpoint=f"{job.name}-0.{job.name}",
        host=host,
        run_id=job.name,
        keys=_KEYS if job.keys else "",
    )
    command = "\n".join([EXPORT, *continued([f"exec {launcher[0]}", *launcher[1:]], "")])
    resources = {"cpu": text(str(job.cpus)), "memory": text(options.memory)}
    devices = {"nvidia.com/gpu": text(str(job.devices))} if job.devices else {}
    return "\n".join(
        [
            *job.header(
                "A Kubernetes manifest",
                "Start it with `kubectl apply -f FILE`; `--dry-run=server` only checks it.",
                f"`kubectl delete job {job.name}` stops the run with a checkpoint; applied",
                "again, it continues.",
                *(_key_usage(job) if job.keys else ()),
            ),
            "apiVersion: v1",
            "kind: Service",
            "metadata:",
            f"  name: {text(job.name)}",
            "spec:",
            "  clusterIP: None  # headless: the name of each pod leads to it",
            "  publishNotReadyAddresses: true",
            "  selector:",
            f"    app: {text(job.name)}",
            "  ports:",
            "    - name: rendezvous",
            f"      port: {job.port}",
            "---",
            "apiVersion: batch/v1",
            "kind: Job",
            "metadata:",
            f"  name: {text(job.name)}",
            "spec:",
            "  completionMode: Indexed",
            f"  completions: {job.num_hosts}",
            f"  parallelism: {job.num_hosts}",
            f"  backoffLimit: {job.num_hosts * job.max_restarts}  # pods that are started again",
            "  template:",
            "    metadata:",
            "      labels:",
            f"        app: {text(job.name)}",
            "    spec:",
            f"      subdomain: {text(job.name)}",
            "      restartPolicy: Never",
            "      # For a step and its checkpoint, when a pod is stopped.",
            f"      terminationGracePeriodSeconds: {job.grace_s}",
            "      containers:",
            "        - name: host",
            f"          image: {text(options.image)}",
            '          command: ["bash", "-euc"]',
            "          args:",
            *_argument(command),
            "          resources:",
            "            requests:",
            *(f"              {name}: {value}" for name, value in (resources | devices).items()),
            "            limits:",
            f"              memory: {resources['memory']}",
            *(f"              {name}: {value}" for name, value in devices.items()),
            "          volumeMounts:",
            "            - name: outputs",
            "              mountPath: /outputs",
            "            - name: shared-memory  # the default of 64 MB has no room for weights",
            "              mountPath: /dev/shm",
            *(_key_mount() if job.keys else ()),
            "      volumes:",
            "        - name: outputs",
            "          persistentVolumeClaim:",
            f"            claimName: {text(options.storage)}",
            "        - name: shared-memory",
            "          emptyDir:",
            "            medium: Memory",
            f"            sizeLimit: {text(options.shared_memory)}",
            *(_key_volume(job) if job.keys else ()),
            "",
        ]
    )


def _argument(command: str) -> list[str]:
    """One element of a YAML list. Kubernetes replaces ``$(NAME)``, and ``$$`` by ``$``."""
    command = re.sub(r"\$(?=[$(])", "$$", command)
    if not is_plain(command):
        return [f"            - {text(command)}"]
    return ["            - |", *(f"{' ' * 14}{line}" for line in command.split("\n"))]


def pod_names(job: Job) -> list[str]:
    """As the other pods, and certificates, have them."""
    return [f"{job.name}-{index}.{job.name}" for index in range(job.num_hosts)]


def _key_usage(job: Job) -> list[str]:
    keys = shell_path(job.keys)
    files = [
        f"--from-file={index}.{file}={keys}/{pod}/{file}"
        for index, pod in enumerate(pod_names(job))
        for file in _FILES
    ]
    return [
        "Before, make keys and put them into a Secret:",
        f"  torchtitan-rl keys --hosts {' '.join(pod_names(job))} --output {keys}",
        f"  kubectl create secret generic {job.name}-keys \\",
        *(f"    {file} \\" for file in files[:-1]),
        f"    {files[-1]}",
    ]


def _key_mount() -> list[str]:
    return [
        "            - name: keys  # of this pod alone",
        f"              mountPath: {_KEYS}",
        "              subPathExpr: $(JOB_COMPLETION_INDEX)",
        "              readOnly: true",
    ]


def _key_volume(job: Job) -> list[str]:
    items = [
        line
        for index in range(job.num_hosts)
        for file in _FILES
        for line in (
            f"              - key: {index}.{file}",
            f"                path: {index}/{file}",
        )
    ]
    return [
        "        - name: keys",
        "          secret:",
        f"            secretName: {text(f'{job.name}-keys')}",
        "            defaultMode: 0400",
        "            items:",
        *items,
    ]
