"""What an API server answered, checked before it is believed. Pure: bytes and JSON in, objects or errors out."""

from __future__ import annotations

import json
from typing import Any

from contextcache.kubernetes_objects import (
    KubernetesAnswerInvalid,
    KubernetesConflict,
    KubernetesError,
    KubernetesExpired,
    KubernetesForbidden,
    KubernetesNotFound,
    KubernetesObject,
    KubernetesUnauthorized,
    KubernetesUnavailable,
    Resource,
)

_MESSAGE_LENGTH_MAX = 300
_ERRORS: dict[int, type[KubernetesError]] = {
    401: KubernetesUnauthorized,
    403: KubernetesForbidden,
    404: KubernetesNotFound,
    409: KubernetesConflict,
    410: KubernetesExpired,
}


def checked_page(resource: Resource, page: KubernetesObject) -> list[KubernetesObject]:
    """Return the objects of one page of a list. Raises KubernetesAnswerInvalid when it is none."""
    # Anything else with status 200 must not pass for "there is nothing"; Go writes that as null too.
    items = page.get("items", "absent")
    if page.get("kind") != f"{resource.kind}List" or not (items is None or isinstance(items, list)):
        raise KubernetesAnswerInvalid(f"the answer is no {resource.kind}List")
    return items or []


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object that the bytes are. Raises KubernetesAnswerInvalid."""
    try:
        found = json.loads(raw)
    except (RecursionError, ValueError) as exc:
        raise KubernetesAnswerInvalid("the answer is no JSON") from exc
    if not isinstance(found, dict):
        raise KubernetesAnswerInvalid("the answer is no object")
    return found


def checked(resource: Resource, found: dict[str, Any]) -> dict[str, Any]:
    """Return the object if it is of that kind and has a resource version. Raises KubernetesAnswerInvalid."""
    if found.get("kind") != resource.kind:
        raise KubernetesAnswerInvalid(f"the answer is no {resource.kind}")
    resource_version_of(found)
    return found


def resource_version_of(found: KubernetesObject) -> str:
    """Return where a watch goes on, or what a write names. Raises KubernetesAnswerInvalid when there is none."""
    version = (found.get("metadata") or {}).get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise KubernetesAnswerInvalid("the answer has no resource version")
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
    return cls(f"{status}: {message}" if message else f"the API server answered {status}")
