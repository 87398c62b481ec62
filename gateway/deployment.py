"""What an operator sees of a deployment through one gateway: its pods as the last probes left them, and its tenants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from contextcache.model import TenantId
from gateway.pods.endpoints import WatchedEndpoints
from gateway.pods.state import EndpointState
from gateway.ports import Authenticator
from gateway.tenants.limits import TenantLimits


@dataclass(frozen=True, slots=True)
class TenantInHand:
    """A tenant that has a key."""

    tenant: TenantId
    key_names: Sequence[str]
    requests: int
    """Of it that this gateway has in hand, as far as they are counted."""
    size_bytes: int
    """Of their bodies."""


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """All pods and a page of tenants."""

    pods: Sequence[EndpointState]
    tenants: Sequence[TenantInHand]
    has_more: bool
    """Whether there are tenants after the last one."""
    limits: TenantLimits
    """Of each tenant."""


class Deployment:
    """Reads what the gateway holds in memory: asks nobody, so it answers when manager and pods do not."""

    def __init__(self, authenticator: Authenticator, endpoints: WatchedEndpoints, limits: TenantLimits) -> None:
        self._authenticator, self._endpoints, self._limits = authenticator, endpoints, limits

    def view(self, *, limit: int, after: TenantId = "") -> DeploymentView:
        """Return all pods by name, and the tenants whose names come after `after`, at most `limit`, 1 or more."""
        key_names = self._authenticator.key_names()
        following = (tenant for tenant in key_names if tenant > after)
        page = list(islice(following, limit + 1))
        return DeploymentView(
            pods=sorted(self._endpoints.roster().states, key=lambda state: state.endpoint.name),
            tenants=[TenantInHand(one, key_names[one], *self._limits.held_by(one)) for one in page[:limit]],
            has_more=len(page) > limit,
            limits=self._limits,
        )
