"""Kinds, lists, watch events and errors of the Kubernetes API, and checks of its answers. Pure.

Objects are JSON as the server sends it. Any field may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from contextcache.errors import ContextCacheError

KubernetesObject = Mapping[str, Any]
"""An object, or a part of it."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, and its URL path."""

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


@dataclass(frozen=True, slots=True)
class Selection:
    """Objects of one kind, in one namespace, with given labels."""

    resource: Resource
    namespace: str
    label_selector: str
    """`key=value[,…]`; empty: all."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All selected objects, at one moment."""

    objects: tuple[KubernetesObject, ...]
    resource_version: str
    """That moment: start of a watch."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change of one object."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    """BOOKMARK: no change. The object has only a resource version."""
    object: KubernetesObject


class KubernetesError(ContextCacheError):
    """Failed call of the API server. It never leaves the process."""

    reason: ClassVar[str] = "unavailable"
    """Label of metrics."""


class KubernetesUnavailable(KubernetesError):
    """No answer in time, or one that asks for a retry."""


class KubernetesForbidden(KubernetesError):
    """403: a Role or its binding lacks the verb; the message names both."""

    reason = "forbidden"


class KubernetesUnauthorized(KubernetesError):
    """401: the token or certificate is not valid."""

    reason = "unauthorized"


class KubernetesNotFound(KubernetesError):
    """404."""

    reason = "not_found"


class KubernetesExpired(KubernetesError):
    """410: the resource version is too old for a watch; list again."""

    reason = "expired"


class KubernetesAnswerInvalid(KubernetesError):
    """Answer that no API server gives."""

    reason = "invalid"


_MESSAGE_LENGTH_MAX = 300
_ERRORS: dict[int, type[KubernetesError]] = {
    401: KubernetesUnauthorized,
    403: KubernetesForbidden,
    404: KubernetesNotFound,
    410: KubernetesExpired,
}


def checked_page(resource: Resource, page: KubernetesObject) -> list[KubernetesObject]:
    """Return the objects of one page of a list. Raises KubernetesAnswerInvalid for another answer."""
    # Another answer with status 200 must not count as an empty list. Go writes an empty list as null.
    items = page.get("items", "absent")
    if page.get("kind") != f"{resource.kind}List" or not (items is None or isinstance(items, list)):
        raise KubernetesAnswerInvalid(f"the Kubernetes API server's answer is not a {resource.kind}List")
    return items or []


def json_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises KubernetesAnswerInvalid."""
    try:
        found = json.loads(raw)
    except (RecursionError, ValueError) as exc:
        raise KubernetesAnswerInvalid("the Kubernetes API server's answer is not JSON") from exc
    if not isinstance(found, dict):
        raise KubernetesAnswerInvalid("the Kubernetes API server's answer is not an object")
    return found


def resource_version_of(found: KubernetesObject) -> str:
    """Return an object's resource version. Raises KubernetesAnswerInvalid if it has none."""
    version = (found.get("metadata") or {}).get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise KubernetesAnswerInvalid("the Kubernetes API server's answer has no resource version")
    return version


def answered_error(status: int, raw: bytes) -> KubernetesError:
    """Return the error of an answer with a bad HTTP status, with any body."""
    try:
        return status_error(status, json_object(raw))
    except KubernetesAnswerInvalid:
        return status_error(status, {})


def status_error(status: object, body: KubernetesObject) -> KubernetesError:
    """Return the error of a code and a Status object."""
    message = str(body.get("message") or "")[:_MESSAGE_LENGTH_MAX]
    cls = _ERRORS.get(status, KubernetesUnavailable) if isinstance(status, int) else KubernetesUnavailable
    return cls(f"{status}: {message}" if message else f"the Kubernetes API server answered with status {status}")
