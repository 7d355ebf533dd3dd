"""The commands that steer the router: pause, resume and the policy versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torchtitan_rl.errors import GenerationError
from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.messages import CommandName, Handler
from torchtitan_rl.serving.refusals import refused

_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


def router_handlers(router: GeneratorRouter) -> dict[CommandName, Handler]:
    """One handler for each of these commands.

    In a training run a pause by a client is ended by the run's own resume, where it has one.
    """

    async def pause(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        mode = arguments.get("mode", "keep")
        if mode not in _MODES:
            modes = ", ".join(_MODES)
            raise refused(400, "invalid_request", f"mode is {mode!r}: give one of {modes}")
        try:
            await router.pause(mode)
        except GenerationError as error:  # a `wait` may take minutes
            message = "somebody resumed before everything had stopped"
            raise refused(409, "resumed", message) from error
        return {"is_paused": True, "mode": mode}

    async def resume(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        await router.resume()
        return {"is_paused": False}

    async def versions(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "newest": router.newest_version,
            "replicas": router.versions(),
            "states": {name: state.value for name, state in router.states().items()},
        }

    return {"pause": pause, "resume": resume, "versions": versions}
