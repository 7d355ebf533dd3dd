"""What must hold for the endpoint's address, files and keys before it starts."""

from __future__ import annotations

from torchtitan_rl.config.chat_template import template_error
from torchtitan_rl.config.checks.parsers import parser_errors
from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.address import Keys, listen
from torchtitan_rl.serving.config import EndpointConfig


def endpoint_errors(endpoint: EndpointConfig, keys: Keys) -> list[str]:
    """One message per error in address, files and keys (`rules` has the amounts). The port is
    opened and closed again."""
    errors = [*_files(endpoint), *parser_errors(endpoint)]
    if not 0 <= endpoint.port <= 65535:
        errors.append(f"endpoint.port is {endpoint.port}: give 0 (a free one) to 65535")
    else:
        try:
            listen(endpoint.host, endpoint.port).close()
        except EndpointLostError as error:
            return [*errors, str(error)]  # who may reach it is not known then
    return errors + keys.errors(endpoint.host)


def _files(endpoint: EndpointConfig) -> list[str]:
    errors = []
    if endpoint.chat_template and (message := template_error(endpoint.chat_template)):
        errors.append(f"endpoint.chat_template is {endpoint.chat_template}: {message}")
    return errors
