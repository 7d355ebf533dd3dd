"""What the endpoint's process holds: the link to the controller, and the HTTP server over it."""

from __future__ import annotations

from typing import Any

from torchtitan_rl.backends.monarch.http_server import HttpServer
from torchtitan_rl.backends.specs import EndpointSpec
from torchtitan_rl.backends.vllm.openai import OpenAIOptions, build_application
from torchtitan_rl.serving.app import AppOptions, EndpointApp
from torchtitan_rl.serving.limits import RequestLimits
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
        spec, endpoint = self._spec, self._spec.endpoint
        application = build_application(
            OpenAIOptions(
                model=str(spec.model),
                max_model_len=spec.max_model_len,
                model_name=endpoint.model_name,
                device=spec.device,
                dtype=spec.dtype,
                tool_call_parser=endpoint.tool_call_parser,
                reasoning_parser=endpoint.reasoning_parser,
                chat_template=endpoint.chat_template,
                max_tokens=endpoint.max_tokens,
                generation_config=spec.generation_config,
            ),
            self.link,
        )
        app = EndpointApp(
            application,
            AppOptions(
                host=endpoint.host,
                keys=spec.keys,
                limits=RequestLimits(
                    max_body_bytes=endpoint.max_body_bytes,
                    max_n=endpoint.max_n,
                    max_tokens=endpoint.max_tokens,
                ),
                max_concurrent_requests=endpoint.max_concurrent_requests,
                max_queued_requests=endpoint.max_queued_requests,
            ),
            commands=self.link,
        )
        self.link.add_gauges(app.counts)
        return app
