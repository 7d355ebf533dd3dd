"""``torchtitan-rl serve`` in a process of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx

from tests.real.runs import Run


@dataclass
class Served:
    """``url`` is without /v1; ``folder`` is where its files are."""

    run: Run
    url: str
    folder: Path
    key: str = "any"

    def gauge(self, name: str) -> float:
        """A metric, summed over its labels."""
        headers = {"Authorization": f"Bearer {self.key}"}
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=60).text
        values = re.findall(rf"^torchtitan_rl_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        self.run.wait_until(condition, what)


def serve(
    folder: Path,
    model: Path,
    *options: str,
    key: str = "any",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Served:
    output = folder / "url"
    run = Run(
        [
            str(model),
            *("--endpoint.port", "0", "--endpoint.start-timeout-s", "600"),
            *("--generator.start-timeout-s", "600", "--log-dir", str(folder / "logs")),
            *options,
        ],
        command="serve",
        log=folder / "log",
        output=output,
        environment=environment,
    )
    run.wait_until(lambda: output.read_text().endswith("\n"), "the endpoint's URL")
    url = output.read_text().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url)
    return Served(run, url.removesuffix("/v1"), folder, key)


def require_end_by_loss_of_endpoint(run: Run) -> None:
    """It ends with 1 and says why, once its endpoint's process is killed."""
    run.process_of("endpoint-rank0").kill()
    assert run.wait() == 1, run.log.read_text()[-3000:]
    assert "error: EndpointLostError: the endpoint's process is lost" in run.log.read_text()
    assert run.left_behind() == []
