"""``torchtitan-rl keys --hosts HOST... [--output DIR]``: keys for the machines of a run.

Exit codes: 0 the keys were written; 2 they cannot be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.config.machine import count
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.addresses import Address

_MAX_DAYS = 3650


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """Make a certificate authority for a run, and a certificate and a private key for each of its
    machines, the controller's included. With them, all that the machines send to each other is
    encrypted, and no other machine can take part."""

    hosts: tuple[str, ...] = ()
    """IP addresses or names under which the machines reach each other. Several addresses or names
    of one machine are joined by commas: ``node3,10.0.0.3``."""
    add: tuple[str, ...] = ()
    """Further machines, for a run whose keys are in ``--output``."""
    output: Path = Path("keys")
    """The folder to write. It gets one subfolder for each machine. Copy the subfolder to the
    machine."""
    days: int = 90
    """Number of days for which the keys are valid; with ``--add``, no longer than the authority in
    ``--output``."""
    quiet: bool = False
    """Print nothing."""


def main(words: Sequence[str]) -> int:
    options = parse_options(KeysConfig, words, prog="torchtitan-rl keys")
    if bool(options.hosts) == bool(options.add):
        raise ConfigError("--hosts: give the machines of a run, or --add for more of one")
    if not 2 <= options.days <= _MAX_DAYS:
        raise ConfigError(f"--days is {options.days}: give 2 to {_MAX_DAYS}")
    from torchtitan_rl.launch.keys import AUTHORITY_KEY, add, create, valid_until

    make = add if options.add else create
    folders = make(options.output, options.add or options.hosts, days=options.days)
    hosts = [host.split(",")[0] for host in options.add or options.hosts]
    if options.quiet:
        return 0
    until = f"valid until {valid_until(folders[0]):%Y-%m-%d}"
    print(f"keys for {count(len(folders), 'machine')} are in {options.output}, {until}")
    print("Copy each machine its own folder, over a connection that you trust:")
    for host, folder in zip(hosts, folders, strict=True):
        print(f"  scp -r {folder} {f'[{host}]' if ':' in host else host}:torchtitan-rl-keys")
    print("and name it there:")
    address = Address(scheme="tls", host=hosts[-1], port=26600)
    print(f"  torchtitan-rl worker --address {address} --keys torchtitan-rl-keys")
    print("  torchtitan-rl train CONFIG --launch.keys torchtitan-rl-keys ...")
    print(f"Where all machines read {options.output}, copy nothing; name {options.output} on each.")
    print(f"Keep {options.output / AUTHORITY_KEY} here: it makes keys of further machines (--add).")
    return 0
