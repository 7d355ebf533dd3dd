"""``torchtitan-rl report RUN_DIR -o report.html``: one file with the page of a run, to be kept or
sent. It opens from disk, without a server and without the network.

The file contains prompts and answers of the run. It is written for a run that is live, too, as the
run is at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchtitan_rl.bounds import Positive, check_fields
from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.config.run import output_file_errors
from torchtitan_rl.errors import ConfigError, OutputError
from torchtitan_rl.files import replace_file


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write one HTML file that shows a run: curves, timeline, configuration, and a sample of its
    rollouts with their tokens. It opens from disk, without a server and without the network."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Folder of a run or of an evaluation, live or finished."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The file to write."""
    max_mb: Positive = 5
    """Size of the file, in millions of bytes. A larger file has more rollouts with their tokens."""


def main(words: Sequence[str]) -> int:
    options = parse_options(ReportOptions, words, prog="torchtitan-rl report")
    check_fields(options, "--")
    errors = [] if options.run.is_dir() else [f"{options.run}: no such folder"]
    if errors := errors + output_file_errors("--output", options.output):
        raise ConfigError(errors)
    from torchtitan_rl.page.index import RunIndex
    from torchtitan_rl.page.report import make_report

    run = RunIndex(options.run.absolute())
    try:
        while run.update(seconds=60.0):
            pass
        content = asyncio.run(make_report(run, max_bytes=1_000_000 * options.max_mb))
    finally:
        run.close()
    try:
        if options.output.is_file() or not options.output.exists():
            replace_file(options.output, content)
        else:  # a device or a pipe, which root could replace
            options.output.write_bytes(content)
    except OSError as error:
        raise OutputError(f"{options.output}: {error}") from error
    print(f"report: {options.output} ({len(content) / 1e6:.1f} MB)")
    return 0
