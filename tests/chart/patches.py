"""The patches that Helm 3 sends: strategic merge for Kubernetes' own kinds, merge (RFC 7396) for custom resources."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

_MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
    "imagePullSecrets": ("name",),
    "topologySpreadConstraints": ("topologyKey",),
    "webhooks": ("name",),
    "secrets": ("name",),
    "ownerReferences": ("uid",),
}
"""Keys that identify the items of a list. Any other list is replaced whole.

Source: `patchMergeKey` in k8s.io/api, for the lists that the chart renders.
"""


def merged(old: Object, patch: Object) -> Object:
    """Return an object after a merge patch; lists are replaced whole."""
    result = dict(old)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            inner = result.get(key)
            result[key] = merged(inner if isinstance(inner, dict) else {}, value)
        else:
            result[key] = value
    return result


def strategically_merged(old: Object, patch: Object) -> Object:
    """Return an object after a strategic merge patch."""
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    kept = patch.get("$retainKeys")
    result = {key: value for key, value in old.items() if kept is None or key in kept}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            inner = result.get(key)
            result[key] = strategically_merged(inner if isinstance(inner, dict) else {}, value)
        elif isinstance(value, list) and (by := _merge_key(key, [*value, *(result.get(key) or [])])):
            result[key] = _merged_list(result.get(key) or [], value, by)
        else:
            result[key] = value
    for key, order in patch.items():
        if key.startswith("$setElementOrder/"):
            name = key.partition("/")[2]
            _sort(result, name, order)
    return result


def _merge_key(name: str, items: list[Any]) -> str:
    """Return the key that all items have, empty: the list is replaced whole."""
    for key in _MERGE_KEYS.get(name, ()):
        if items and all(isinstance(item, dict) and key in item for item in items):
            return key
    return ""


def _merged_list(old: list[Object], patch: list[Object], by: str) -> list[Object]:
    result = list(old)
    for item in patch:
        at = next((index for index, found in enumerate(result) if found[by] == item[by]), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(strategically_merged({}, item))
        else:
            result[at] = strategically_merged(result[at], item)
    return result


def _sort(result: Object, name: str, order: list[Any]) -> None:
    items = result.get(name) or []
    by = _merge_key(name, [*items, *order])
    if by:
        places = {item[by]: place for place, item in enumerate(order)}
        result[name] = sorted(items, key=lambda item: places.get(item[by], len(places)))
