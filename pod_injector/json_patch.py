"""The difference of two JSON documents as an RFC 6902 patch. Pure.

Lists that only got items before, between or after become `add`s, so that a patch is as small as the change and merges
with those of other webhooks; a list that lost items is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def json_patch(before: Any, after: Any) -> list[dict[str, Any]]:
    """Return operations that turn `before` into `after`, in the order in which they apply."""
    return list(_operations(before, after, ""))


def _operations(before: Any, after: Any, path: str) -> Iterator[dict[str, Any]]:
    if _are_same(before, after):
        return
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_objects(before, after, path)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _of_lists(before, after, path)
    else:
        yield {"op": "replace", "path": path, "value": after}


def _of_objects(before: dict[str, Any], after: dict[str, Any], path: str) -> Iterator[dict[str, Any]]:
    for key in before.keys() - after.keys():
        yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
    for key, value in after.items():
        where = f"{path}/{_escaped(key)}"
        if key in before:
            yield from _operations(before[key], value, where)
        else:
            yield {"op": "add", "path": where, "value": value}


def _of_lists(before: list[Any], after: list[Any], path: str) -> Iterator[dict[str, Any]]:
    if len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _operations(old, new, f"{path}/{index}")
        return
    added = _added_indices(before, after)
    if added is None:
        yield {"op": "replace", "path": path, "value": after}
        return
    for index in added:
        yield {"op": "add", "path": f"{path}/{index}", "value": after[index]}


def _added_indices(before: list[Any], after: list[Any]) -> list[int] | None:
    """Return the indices of items in `after` that `before` lacks, ascending; None when it lost some."""
    added: list[int] = []
    kept = 0
    for index, item in enumerate(after):
        if kept < len(before) and _are_same(item, before[kept]):
            kept += 1
        else:
            added.append(index)
    return added if kept == len(before) else None


def _are_same(one: Any, other: Any) -> bool:
    # As text: in Python 1 == True.
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
