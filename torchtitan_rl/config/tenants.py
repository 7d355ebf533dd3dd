"""Checks of ``generator.endpoint``: runs on a server's engines, and commands with their own."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from torchtitan_rl.config.run import RunConfig, has_hosts
from torchtitan_rl.distillation.config import is_url
from torchtitan_rl.generation.config import GeneratorConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # as in `serving/tenant_routes.py`


def own_replicas_errors(generator: GeneratorConfig, what: str) -> list[str]:
    """An error if a command with replicas of its own is to use those of a server. ``what`` says
    what it does with them, such as "serve starts"."""
    if not generator.endpoint:
        return []
    return [f"generator.endpoint is {generator.endpoint}: {what} replicas; leave it out"]


def served_errors(config: RunConfig) -> list[str]:
    """Check a run whose engines are those of a server; one message per field."""
    generator = config.generator
    if not generator.endpoint:
        return []
    own = GeneratorConfig(replicas=1)
    given = [
        ("mode", config.mode, "both"),
        ("placement", config.placement, "separate"),
        ("generator.replicas", generator.replicas, 1),
        *(
            (f"generator.{name}", getattr(generator, name), getattr(own, name))
            for name in ("tensor_parallel", "vllm", "batch_invariant")
        ),
    ]
    errors = [
        f"{name} is {value}: with generator.endpoint give {wanted}"
        for name, value, wanted in given
        if value != wanted
    ]
    if not _is_base_url(generator.endpoint):
        errors.append(
            f"generator.endpoint is {generator.endpoint}: give a URL such as http://host:8000/v1"
        )
    if not config.policy.lora.rank:
        errors.append(
            "generator.endpoint: a server's engines hold adapters of several runs; give "
            "policy.lora.rank, too"
        )
    if has_hosts(config.launch):
        errors.append("generator.endpoint: the trainer must be on this machine; leave out launch")
    if config.weight_sync.transport == "rdma":
        errors.append("weight_sync.transport is rdma: with generator.endpoint give auto")
    if not _NAME.fullmatch(config.name):
        errors.append(
            f"name is {config.name}: with generator.endpoint give letters, digits, dots, hyphens "
            "and underscores"
        )
    return errors


def _is_base_url(text: str) -> bool:
    """Whether paths can be appended to it. A user or password in it would be printed and logged."""
    try:
        parts = urlsplit(text)
        is_whole = parts.port is None or parts.port > 0
    except ValueError:  # of a port or an IPv6 address
        return False
    is_plain = text == f"{parts.scheme}://{parts.netloc}{parts.path}" and "@" not in text
    is_ascii = re.fullmatch(r"[!-\[\]-~]+", text) is not None  # no spaces and backslashes
    return is_url(text) and bool(parts.hostname) and is_whole and is_plain and is_ascii
