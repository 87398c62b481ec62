"""An operator's view of a deployment through one gateway: its pods at their last probes, and its tenants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from contextcache.errors import ModelNotFound
from contextcache.model import ModelId, TenantId
from gateway.parts import Parts
from gateway.pods.state import EndpointState
from gateway.tenants.limits import TenantLimits


@dataclass(frozen=True, slots=True)
class TenantInHand:
    """A tenant that has a key, with its requests in flight as far as this gateway counts them."""

    tenant: TenantId
    key_names: Sequence[str]
    requests: int
    size_bytes: int
    """Bytes of the requests' bodies."""


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """All pods, and a page of tenants."""

    pods: Sequence[EndpointState]
    tenants: Sequence[TenantInHand]
    has_more: bool
    """True: tenants follow after the last one."""
    limits: TenantLimits
    """Limits of each tenant."""


def deployment_view(parts: Parts, *, limit: int, after: TenantId = "") -> DeploymentView:
    """Return all pods by name, and at most `limit` tenants after the name `after`; `limit` is 1 or more.

    Reads memory only, so it answers while the context manager and the pods do not.
    """
    key_names, tenants = parts.keys.key_names(), parts.tenants
    page = list(islice((tenant for tenant in key_names if tenant > after), limit + 1))
    return DeploymentView(
        pods=sorted(parts.endpoints.states(), key=lambda state: state.endpoint.name),
        tenants=[TenantInHand(one, key_names[one], *tenants.held_by(one)) for one in page[:limit]],
        has_more=len(page) > limit,
        limits=tenants,
    )


def model_seen_s(parts: Parts, model: ModelId) -> int:
    """Return the time of the call as the `created` of a served model, as vLLM's list does. Raises ModelNotFound."""
    if not parts.endpoints.roster().serves(model):
        raise ModelNotFound(f"the model `{model}` does not exist", param="model")
    return parts.clock.now_ms() // 1000
