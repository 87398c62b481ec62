"""Words of the Kubernetes API: kinds, lists, watch events and how calls fail. What speaks to a server is not here.

Objects are JSON as the server sends it; whoever reads one takes any field to be absent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from contextcache.errors import ContextCacheError

KubernetesObject = Mapping[str, Any]
"""One object, or a part of one."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, and where the server keeps it."""

    group_version: str
    """`v1`, or `group/version`."""
    plural: str
    kind: str

    def path(self, namespace: str, name: str = "") -> str:
        """Return the URL path of all objects in a namespace, or of one."""
        root = "/api" if "/" not in self.group_version else "/apis"
        return f"{root}/{self.group_version}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")


ENDPOINT_SLICES = Resource("discovery.k8s.io/v1", "endpointslices", "EndpointSlice")
PODS = Resource("v1", "pods", "Pod")
LEASES = Resource("coordination.k8s.io/v1", "leases", "Lease")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects: of one kind, in one namespace, with these labels."""

    resource: Resource
    namespace: str
    label_selector: str
    """`key=value[,…]`; empty: all."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects that were asked for, as they were together at one moment."""

    objects: tuple[KubernetesObject, ...]
    resource_version: str
    """That moment: where a watch goes on."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    """BOOKMARK: nothing changed; the object holds no more than a resource version to go on from."""
    object: KubernetesObject


class KubernetesError(ContextCacheError):
    """A call of the API server failed. These stay in the process that made the call."""

    reason: ClassVar[str] = "unavailable"
    """Label of metrics."""


class KubernetesUnavailable(KubernetesError):
    """No answer in time, or one that says to come again."""


class KubernetesForbidden(KubernetesError):
    """403: a Role or its binding lacks the verb; the message names both."""

    reason = "forbidden"


class KubernetesUnauthorized(KubernetesError):
    """401: the token or certificate is not believed."""

    reason = "unauthorized"


class KubernetesNotFound(KubernetesError):
    """404."""

    reason = "not_found"


class KubernetesConflict(KubernetesError):
    """409: somebody else changed or made the object first."""

    reason = "conflict"


class KubernetesExpired(KubernetesError):
    """410: the resource version is too old to go on from; list again."""

    reason = "expired"


class KubernetesAnswerInvalid(KubernetesError):
    """Something answered that is no API server, or not one of ours."""

    reason = "invalid"


class KubernetesReader(Protocol):
    """Lists and watches. Every call ends by a deadline and raises KubernetesError."""

    async def list(self, selection: Selection) -> Listing:
        """Return the newest state, from a quorum of the server's store."""
        ...

    def watch(
        self, selection: Selection, *, resource_version: str, timeout_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Follow the changes since `resource_version`, in order, for `timeout_s` or until the server ends it.

        Raises KubernetesExpired when they are no longer known.
        """
        ...


class KubernetesLeases(Protocol):
    """Reads and writes single objects. Every call ends by `timeout_s` and raises KubernetesError."""

    async def get(self, resource: Resource, *, namespace: str, name: str, timeout_s: float) -> KubernetesObject:
        """Return the object. Raises KubernetesNotFound."""
        ...

    async def create(
        self, resource: Resource, body: KubernetesObject, *, namespace: str, timeout_s: float
    ) -> KubernetesObject:
        """Store a new object. Raises KubernetesConflict when there is one of its name."""
        ...

    async def replace(
        self, resource: Resource, body: KubernetesObject, *, namespace: str, timeout_s: float
    ) -> KubernetesObject:
        """Store the object unless it has changed since its resource version. Raises KubernetesConflict when it has."""
        ...
