"""``python -m tests.support.sandbox_server ISOLATION``: runs snippets that it reads, one a line.

Its user owns two files: ``shown`` is one that snippets may read, ``hidden`` is not.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.sandbox.sandbox import Sandbox, SandboxConfig, SandboxLimits


async def main(folder: str) -> None:
    files = {name: Path(folder, name, "file") for name in ("shown", "hidden")}
    for file in files.values():
        file.parent.mkdir()
        file.write_text("text")
        file.chmod(0o600)
    tempfile.tempdir = os.environ["TMPDIR"] = f"{folder}/temporary"
    os.mkdir(tempfile.tempdir)
    config = SandboxConfig(isolation=sys.argv[1], readable=(str(files["shown"].parent),))
    if errors := config.errors("sandbox"):
        print(json.dumps({"unavailable": errors[0]}), flush=True)
        return
    async with Sandbox(config) as sandbox:
        started = {"zygote": sandbox._zygote._process.pid, "temporary": tempfile.tempdir}
        print(json.dumps(started | {name: str(file) for name, file in files.items()}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            options = json.loads(line)
            if "limits" in options:
                options["limits"] = SandboxLimits(**options["limits"])
            try:
                answer = asdict(await sandbox.run(**options))
            except TorchtitanRLError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        asyncio.run(main(folder))
