"""A Compose file for Docker: a worker in each container, and the controller in one more."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.scripts.job import Job, shell_path, text

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_PORT = 26600
_KEYS = "/keys"


@dataclass(frozen=True, kw_only=True)
class ComposeOptions:
    """What only Docker needs."""

    image: str = "torchtitan-rl:latest"
    """An image with this package, CONFIG and the policy."""
    outputs: str = "./outputs"
    """The folder of this machine that is mounted at /outputs."""
    shared_memory: str = "8gb"
    """Room for weights in /dev/shm of each container."""


def compose_file(job: Job, options: ComposeOptions) -> str:
    """The containers share this machine's CUDA devices: the first host has the first ones.

    Raises:
        ConfigError: the name cannot be that of a project.
    """
    if not _NAME.fullmatch(job.name):
        raise ConfigError(
            f"--name is {job.name!r}: give small letters, digits, hyphens and underscores, "
            "of which the first is a letter or a digit"
        )
    hosts = [f"host{index}" for index in range(job.num_hosts)]
    lines = [
        *job.header(
            "A Compose file",
            "Start it with `docker compose -f FILE up --exit-code-from controller`; `... config`",
            "only checks it. `... stop` stops the run with a checkpoint, and it can be started",
            "again.",
            *(_key_usage(job, hosts) if job.keys else ()),
        ),
        f"name: {text(job.name)}",
        "services:",
    ]
    keys = ["--keys", _KEYS] if job.keys else ["--allow-plain-tcp"]
    for index, host in enumerate(hosts):
        command = ["torchtitan-rl", "worker", "--address", _address(job, host)]
        lines += [
            *_service(job, options, host, [*command, *keys]),
            "    healthcheck:  # it listens",
            f"      test: {text(['CMD', 'python', '-c', _LISTENS.format(host=host)])}",
            "      interval: 2s",
            "      timeout: 5s",
            "      retries: 60",
            *(_devices(job, index) if job.devices else ()),
        ]
    addresses = [_address(job, host) for host in hosts]
    inside = job.with_outputs("/outputs")
    command = ["torchtitan-rl", "train", job.config, *inside.run_options()]
    command += ["--launch.keys", _KEYS] if job.keys else []
    command += ["--launch.attach", *addresses, "--launch.address", _address(job, "controller")]
    lines += [
        *_service(job, options, "controller", command),
        f"    stop_grace_period: {job.grace_s}s  # for a step and its checkpoint",
        "    depends_on:",
    ]
    for host in hosts:
        lines += [f"      {host}:", "        condition: service_healthy"]
    return "\n".join([*lines, ""])


_LISTENS = "import socket; socket.create_connection(('{host}', 26600), 3)"


def _text(value: object) -> str:
    """Compose replaces ``$NAME``, and ``$$`` by ``$``."""
    return text(value).replace("$", "$$")


def _address(job: Job, host: str) -> str:
    return f"{'tls' if job.keys else 'tcp'}://{host}:{_PORT}"


def _service(job: Job, options: ComposeOptions, host: str, command: list[str]) -> list[str]:
    keys = _mount(f"{job.keys}/{host}", _KEYS, "read_only: true") if job.keys else []
    return [
        f"  {host}:",
        f"    image: {_text(options.image)}",
        f"    hostname: {host}",
        "    init: true",
        f"    shm_size: {_text(options.shared_memory)}",
        "    volumes:",
        *_mount(options.outputs, "/outputs", "bind: {create_host_path: true}"),
        *keys,
        f"    command: {_text(command)}",
    ]


def _mount(source: str, target: str, how: str) -> list[str]:
    if not source.startswith((".", "/", "~")):
        source = f"./{source}"
    return [
        "      - type: bind",
        f"        source: {_text(source)}",
        f"        target: {target}",
        f"        {how}",
    ]


def _devices(job: Job, index: int) -> list[str]:
    first = index * job.devices
    ids = [str(device) for device in range(first, first + job.devices)]
    return [
        "    deploy:",
        "      resources:",
        "        reservations:",
        "          devices:",
        "            - driver: nvidia",
        f"              device_ids: {text(ids)}",
        '              capabilities: ["gpu"]',
    ]


def _key_usage(job: Job, hosts: list[str]) -> list[str]:
    words = f"--hosts {' '.join(hosts)} controller --output {shell_path(job.keys)}"
    return ["Before, make keys:", f"  torchtitan-rl keys {words}"]
