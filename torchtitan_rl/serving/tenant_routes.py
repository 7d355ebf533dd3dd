"""The routes of training runs that use the server's engines (`tenancy/client.py`). Each request
becomes one command to the controller. Bodies are bytes, which the controller checks."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import CommandName
from torchtitan_rl.serving.routes import ERRORS, MAX_VERSION, Commands

TENANTS_PREFIX = "/v1/tenants"
_MAX_NUMBER = 2**53
_MAX_CHARS = 256

Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
Lease = Annotated[str, Header(alias="x-tenant-lease", max_length=_MAX_CHARS)]
Version = Annotated[int, Path(ge=0, le=MAX_VERSION)]
Number = Annotated[int, Query(ge=0, le=_MAX_NUMBER)]


class Registration(BaseModel):
    model_config = ConfigDict(extra="forbid")

    owner: str = Field(
        min_length=1, max_length=_MAX_CHARS, description="Tells a run from others of its name."
    )
    policy: str = Field(min_length=1, max_length=_MAX_CHARS, description="Digest of the policy.")
    max_model_len: int = Field(ge=1, le=_MAX_NUMBER)
    rank: int = Field(ge=1, le=512)
    alpha: float = Field(gt=0, le=1e6, allow_inf_nan=False)
    target_modules: list[str] = Field(min_length=1, max_length=16)


class LeaseAnswer(BaseModel):
    """Each later request sends `lease` in the header `X-Tenant-Lease`."""

    lease: str
    lease_s: float


def tenant_routes(commands: Commands) -> APIRouter:
    responses = ERRORS | {410: ERRORS[401]}
    router = APIRouter(prefix=TENANTS_PREFIX, tags=["tenants"], responses=responses)

    async def ask(name: CommandName, tenant: str, **arguments: Any) -> Any:
        return await commands.command(name, {"name": tenant, **arguments})

    @router.post("/{tenant}", response_model=LeaseAnswer)
    async def register(tenant: Name, request: Registration) -> Any:
        """Register a run with adapters."""
        return await ask("tenant.open", tenant, **request.model_dump())

    @router.delete("/{tenant}")
    async def leave(tenant: Name, lease: Lease) -> Any:
        """End the run's requests, and free its place."""
        return await ask("tenant.close", tenant, lease=lease)

    @router.post("/{tenant}/messages")
    async def send(tenant: Name, lease: Lease, number: Number, request: Request) -> Any:
        """Send a batch of calls."""
        messages = await request.body()
        return await ask("tenant.send", tenant, lease=lease, number=number, messages=messages)

    @router.get("/{tenant}/messages")
    async def receive(tenant: Name, lease: Lease, after: Number) -> Response:
        """The batch of messages after this one, once there is one; its number is in `X-Batch`."""
        answer = await ask("tenant.receive", tenant, lease=lease, after=after)
        headers = {"x-batch": str(answer["number"])}
        return Response(answer["messages"], media_type="application/msgpack", headers=headers)

    @router.put("/{tenant}/versions/{version}")
    async def upload(
        tenant: Name, lease: Lease, version: Version, offset: Number, request: Request
    ) -> Any:
        """Upload the next part of an adapter, a safetensors file."""
        part = await request.body()
        if not part:
            raise RefusedError(400, "empty_part", "the part is empty")
        arguments = {"version": version, "offset": offset, "part": part}
        return await ask("tenant.upload", tenant, lease=lease, **arguments)

    @router.post("/{tenant}/versions/{version}")
    async def stage(tenant: Name, lease: Lease, version: Version) -> Any:
        """Load an uploaded adapter into the engines."""
        return await ask("tenant.stage", tenant, lease=lease, version=version)

    return router
