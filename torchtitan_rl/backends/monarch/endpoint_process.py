"""What the endpoint's process holds: the link to the controller, and the HTTP server over it."""

from __future__ import annotations

from typing import Any

from torchtitan_rl.backends.monarch.http_server import HttpServer
from torchtitan_rl.backends.specs import EndpointSpec
from torchtitan_rl.backends.vllm.openai import build_application
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.link import ControllerLink


class EndpointProcess:
    """Serves from its construction on.

    Raises:
        EndpointLostError: the address is taken.
        ConfigError: the serving layer refuses its options, such as an unknown parser.
    """

    def __init__(self, spec: EndpointSpec) -> None:
        self._spec = spec
        self.link = ControllerLink()
        self._server = HttpServer(
            self._build,
            at_end=self.link.close,
            host=spec.endpoint.host,
            port=spec.endpoint.port,
        )
        self._server.start()

    @property
    def port(self) -> int:
        return self._server.port

    def require_running(self) -> None:
        self._server.require_running()

    def close(self, grace_s: float) -> None:
        self._server.close(grace_s)

    async def _build(self) -> Any:
        self.link.attach()
        application = build_application(self._spec, self.link)
        app = EndpointApp(
            application, self._spec.endpoint, keys=self._spec.keys, commands=self.link
        )
        self.link.add_gauges(app.counts)
        return app
