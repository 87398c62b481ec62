"""Words of the Kubernetes API: kinds, lists, watch events, how calls fail, what an answer must be. Pure.

Objects are JSON as the server sends it; whoever reads one takes any field to be absent.
"""

from __future__ import annotations

import json
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

    def path(self, namespace: str) -> str:
        """Return the URL path of all objects in a namespace."""
        root = "/api" if "/" not in self.group_version else "/apis"
        return f"{root}/{self.group_version}/namespaces/{namespace}/{self.plural}"


ENDPOINT_SLICES = Resource("discovery.k8s.io/v1", "endpointslices", "EndpointSlice")
PODS = Resource("v1", "pods", "Pod")
EVENTS = Resource("v1", "events", "Event")
REPLICA_SETS = Resource("apps/v1", "replicasets", "ReplicaSet")


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


class KubernetesExpired(KubernetesError):
    """410: the resource version is too old to go on from; list again."""

    reason = "expired"


class KubernetesAnswerInvalid(KubernetesError):
    """Something answered that is no API server, or not one of ours."""

    reason = "invalid"


class KubernetesExists(KubernetesError):
    """An object of this name is there already."""

    reason = "exists"


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


_MESSAGE_LENGTH_MAX = 300
_ERRORS: dict[int, type[KubernetesError]] = {
    401: KubernetesUnauthorized,
    403: KubernetesForbidden,
    404: KubernetesNotFound,
    409: KubernetesExists,
    410: KubernetesExpired,
}


def checked_page(resource: Resource, page: KubernetesObject) -> list[KubernetesObject]:
    """Return the objects of one page of a list. Raises KubernetesAnswerInvalid when it is none."""
    # Anything else with status 200 must not pass for "there is nothing"; Go writes that as null too.
    items = page.get("items", "absent")
    if page.get("kind") != f"{resource.kind}List" or not (items is None or isinstance(items, list)):
        raise KubernetesAnswerInvalid(f"the Kubernetes API server's answer is not a {resource.kind}List")
    return items or []


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object that the bytes are. Raises KubernetesAnswerInvalid."""
    try:
        found = json.loads(raw)
    except (RecursionError, ValueError) as exc:
        raise KubernetesAnswerInvalid("the Kubernetes API server's answer is not JSON") from exc
    if not isinstance(found, dict):
        raise KubernetesAnswerInvalid("the Kubernetes API server's answer is not an object")
    return found


def resource_version_of(found: KubernetesObject) -> str:
    """Return where a watch goes on. Raises KubernetesAnswerInvalid when there is none."""
    version = (found.get("metadata") or {}).get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise KubernetesAnswerInvalid("the Kubernetes API server's answer has no resource version")
    return version


def answered_error(status: int, raw: bytes) -> KubernetesError:
    """Return the error of an answer with a bad HTTP status, whatever its body is."""
    try:
        return status_error(status, json_object(raw))
    except KubernetesAnswerInvalid:
        return status_error(status, {})


def status_error(status: object, body: KubernetesObject) -> KubernetesError:
    """Return the error that a code and a Status object are."""
    message = str(body.get("message") or "")[:_MESSAGE_LENGTH_MAX]
    cls = _ERRORS.get(status, KubernetesUnavailable) if isinstance(status, int) else KubernetesUnavailable
    return cls(f"{status}: {message}" if message else f"the Kubernetes API server answered with status {status}")
