"""Field ownership: which manager owns which field of an object (`metadata.managedFields`).

Rules: "Server-Side Apply" in the Kubernetes documentation.
- Apply: the manager owns exactly the fields of its intent. A field that it leaves out is removed, unless another
  manager owns it.
- Apply of another value than the live one to a field of another manager is a conflict, unless forced.
- Update (create, replace, patch): the manager takes each field that it changes from all other managers.
- Name, operation and subresource identify a manager: `helm` with updates is another manager than `helm` with applies.

A list is one field here. An API server tells the items of some lists apart (containers by name).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
Path = tuple[str, ...]
_UNOWNED = {"apiVersion", "kind", "status"}
_OWNED_METADATA = {"labels", "annotations", "finalizers", "ownerReferences"}


@dataclass(frozen=True, order=True)
class Manager:
    """The actor behind a write."""

    name: str
    operation: str
    """`Apply` or `Update`."""
    subresource: str = ""

    def __str__(self) -> str:
        return f'"{self.name}"' + (f' with subresource "{self.subresource}"' if self.subresource else "")


Owners = dict[Manager, set[Path]]


class ConflictError(Exception):
    """An apply changes fields of other managers: one line for each, as an API server words it."""


def owners_of(found: Object) -> Owners:
    """Return the owned fields by manager."""
    entries = found.get("metadata", {}).get("managedFields") or []
    return {
        Manager(entry["manager"], entry["operation"], entry.get("subresource", "")): set(_parsed(entry["fieldsV1"]))
        for entry in entries
        if entry
    }


def set_owners(found: Object, owners: Owners) -> None:
    """Write `metadata.managedFields`; a manager without fields is left out."""
    entries = []
    for manager in sorted(owner for owner, fields in owners.items() if fields):
        entry = {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": found["apiVersion"],
            "time": "2026-01-01T00:00:00Z",
            "fieldsType": "FieldsV1",
            "fieldsV1": _nested(owners[manager]),
        }
        entries.append(entry | ({"subresource": manager.subresource} if manager.subresource else {}))
    found["metadata"]["managedFields"] = entries


def applied(live: Object, intent: Object, name: str, *, force: bool) -> tuple[Object, Owners]:
    """Return the object after a server-side apply, before defaults, and its owners. Raises ConflictError."""
    me, owners = Manager(name, "Apply"), owners_of(live)
    wanted, had = fields_of(intent), fields_of(live)
    changed = {path for path, value in wanted.items() if path not in had or had[path] != value}
    mine = owners.pop(me, set())
    conflicts = sorted((owner, path) for owner, fields in owners.items() for path in fields & changed)
    if conflicts and not force:
        version = intent["apiVersion"]
        lines = [f"conflict with {owner} using {version}: .{'.'.join(path)}" for owner, path in conflicts]
        many = "conflict" if len(lines) == 1 else "conflicts"
        raise ConflictError(f"Apply failed with {len(lines)} {many}: {', '.join(lines)}")
    result = copy.deepcopy(live)
    for path in mine - wanted.keys():
        if not any(path in fields for fields in owners.values()):
            _remove(result, path)
    for path, value in wanted.items():
        _put(result, path, copy.deepcopy(value))
    for key in ("apiVersion", "kind"):
        result[key] = intent[key]
    for key in ("name", "namespace"):
        if key in intent.get("metadata", {}):
            result.setdefault("metadata", {})[key] = intent["metadata"][key]
    return result, {owner: fields - changed for owner, fields in owners.items()} | {me: set(wanted)}


def updated(live: Object, new: Object, manager: Manager) -> Owners:
    """Return the owners after a write that is no apply; both objects have their defaults."""
    had, has = fields_of(live), fields_of(new)
    changed = {path for path, value in has.items() if path not in had or had[path] != value}
    gone = had.keys() - has.keys()
    # A client that sends managedFields may edit them; one that sends none, or does not know them, keeps them.
    owners = owners_of(new) or owners_of(live)
    mine = owners.pop(manager, set())
    return {owner: fields - changed - gone for owner, fields in owners.items()} | {manager: (mine | changed) - gone}


def fields_of(found: Object) -> dict[Path, Any]:
    """Return every field that managers can own, with its value."""
    owned = {key: value for key, value in found.items() if key not in _UNOWNED and key != "metadata"}
    owned["metadata"] = {key: value for key, value in found.get("metadata", {}).items() if key in _OWNED_METADATA}
    return dict(_leaves(owned, ()))


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif path != ("metadata",):
        yield path, value


def _put(found: Object, path: Path, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(found.get(key), dict):
            found[key] = {}
        found = found[key]
    found[path[-1]] = value


def _remove(found: Object, path: Path) -> None:
    """Remove a field, and the maps that it leaves empty."""
    key, *rest = path
    if rest and isinstance(found.get(key), dict):
        _remove(found[key], tuple(rest))
    if not rest or found.get(key) == {}:
        found.pop(key, None)


def _nested(paths: Iterable[Path]) -> Object:
    result: Object = {}
    for path in sorted(paths):
        node = result
        for key in path:
            node = node.setdefault(f"f:{key}", {})
    return result


def _parsed(node: Object, path: Path = ()) -> Iterator[Path]:
    for key, inner in node.items():
        if key != ".":
            here = (*path, key.removeprefix("f:"))
            yield from _parsed(inner, here) if inner else [here]
