"""``torchtitan-rl fit CONFIG --devices 1x24GB [options of the run]``: prints a command with which a
run fits on CUDA devices, which need not be on this machine, and the memory of its ranks.

Exit codes: 0 the run fits with the printed options; 1 nothing fits; 2 an option is wrong.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from torchtitan_rl.bounds import check_fields
from torchtitan_rl.config.fit import (
    describe_shortage,
    device_bytes,
    fitting_options,
    option_words,
)
from torchtitan_rl.config.hosts import chosen_host_errors
from torchtitan_rl.config.loader import load_config, split_config, take_options
from torchtitan_rl.config.machine import HostFacts, count, made_up_hosts
from torchtitan_rl.config.memory import memory_plan
from torchtitan_rl.config.model import PolicyFacts, find_policy
from torchtitan_rl.config.published import published_facts
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.tenants import own_replicas_errors
from torchtitan_rl.errors import ConfigError

_PROG = "torchtitan-rl fit"
_OPTION = "--devices"
HELP = f"""\
usage: {_PROG} CONFIG {_OPTION} 1x24GB [options of the run]

Proposes options with which a run fits on its devices: placement, ranks of the trainer, replicas,
tensor parallelism, tokens of a microbatch, activation checkpointing, and the engines' share.
  {_OPTION} 1x24GB     one device; 8x80GB: one host; 2x8x80GB: two hosts
The policy need not be on this machine if it is a published Qwen3, Qwen2.5, Qwen2.5-VL or
Llama 3.
"""


def main(words: Sequence[str]) -> int:
    config_file, options = split_config(words, prog=_PROG)
    given, overrides = take_options(options, (_OPTION,))
    if not given:
        raise ConfigError(f"{_OPTION} is missing: give such as {_OPTION} 1x24GB or 2x8x80GB")
    devices = given[_OPTION]
    config = load_config(config_file, overrides)
    check_fields(config)
    hosts = _hosts(devices)
    errors = own_replicas_errors(config.generator, "fit places")
    if errors := [*errors, *chosen_host_errors(replace(config.launch, hosts=devices))]:
        raise ConfigError(errors)
    checkpoint = config.policy.checkpoint
    policy = _facts(checkpoint, field="policy.checkpoint")
    in_trainer = config.teacher.sources if config.teacher.is_in_trainer else ()
    teachers = [_facts(one, field="teacher.checkpoint") for one in in_trainer]
    what = f"{checkpoint} ({policy.num_weights / 1e9:.1f} B parameters)"
    on = f"{count(len(hosts), 'host')} of {hosts[0].describe()}"
    changes = fitting_options(config, policy, hosts, uses_all=True, teachers=teachers)
    if changes is None:
        done = "run" if config.mode == "generate" else "be trained"
        shortage = describe_shortage(config, policy, hosts, teachers)
        print(f"nothing fits: {what} cannot {done} on {on}: {shortage}")
        return 1
    chosen = load_config(config_file, [*overrides, *option_words(changes)])
    command = ["torchtitan-rl", "train", str(config_file), *overrides, *option_words(changes)]
    lines = [f"{what} fits on {on}", *_describe(chosen, policy, hosts, teachers)]
    if len(hosts) > 1:
        lines.append("docs/clusters.md says how to start this command on several hosts:")
    print("\n".join([*lines, shlex.join(command)]))
    return 0


def _facts(checkpoint: str, *, field: str) -> PolicyFacts:
    return published_facts(checkpoint) or find_policy(checkpoint, field=field, is_trained=True)[1]


def _describe(
    config: RunConfig,
    policy: PolicyFacts,
    hosts: Sequence[HostFacts],
    teachers: Sequence[PolicyFacts],
) -> list[str]:
    trainer, generator = config.trainer, config.generator
    plan = memory_plan(
        config, policy, device="cuda", device_bytes=device_bytes(hosts), teachers=teachers
    )
    parts: list[str] = [config.placement]
    if config.mode != "generate":
        parts.append(count(trainer.world_size, "trainer rank"))
    if config.mode != "train":
        ranks = count(generator.tensor_parallel, "rank")
        parts.append(f"{count(generator.replicas, 'replica')} of {ranks}")
    return [f"placement: {', '.join(parts)}", *plan.describe()]


def _hosts(text: str) -> tuple[HostFacts, ...]:
    try:
        hosts = made_up_hosts(text)
    except ValueError:
        hosts = ()
    if not device_bytes(hosts):
        raise ConfigError(
            f"{_OPTION} is {text!r}: give the number of devices and their size, such as 1x24GB or "
            "8x80GB, or for several hosts 2x8x80GB"
        )
    return hosts
