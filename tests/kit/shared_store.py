"""The shared store as a directory: its objects, calls of it that are held up or refused, and a manager's answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from contextcache.errors import SidecarUnavailable
from contextcache.model import HeldCacheRef
from kv_sidecar.store.collector import COLLECTOR


class NamedRefs:
    """A manager whose sessions name these refs and no others."""

    def __init__(self, *refs: str) -> None:
        self.refs = set(refs)

    async def orphans(self, held: Sequence[HeldCacheRef]) -> Sequence[int]:
        return [position for position, it in enumerate(held) if it.cache_ref not in self.refs]


class Killed(BaseException):
    """Raised where a process would end."""


def kill_at(point: str, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Have these modules raise `Killed` at a crash point until `monkeypatch.undo()`."""

    def die(passed: str) -> None:
        if passed == point:
            raise Killed

    for module in modules:
        monkeypatch.setattr(module, "crash_point", die)


class Held:
    """A method of an object, held up until `may_go_on`: its calls whose first argument contains `part`."""

    def __init__(self, owner: object, method: str, part: str = "") -> None:
        self._do = getattr(owner, method)
        self._part = part
        self.has_come, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.num_come = 0
        setattr(owner, method, self)

    async def __call__(self, *args: Any, **more: Any) -> Any:
        if self._part in str(args[0]):
            self.has_come.set()
            self.num_come += 1
            await self.may_go_on.wait()
        return await self._do(*args, **more)


async def never(*_: object, **__: object) -> None:
    """Never answer."""
    await asyncio.Event().wait()


def refuse(owner: object, method: str, monkeypatch: pytest.MonkeyPatch, part: str = "") -> None:
    """Refuse a method's calls whose first argument contains `part`, until `monkeypatch.undo()`."""
    do = getattr(owner, method)

    def refused(name: str, *args: Any) -> Any:
        if part in name:
            raise SidecarUnavailable("down")
        return do(name, *args)

    monkeypatch.setattr(owner, method, refused)


def objects(root: Path, kind: str = "") -> set[str]:
    """Return the names of the objects of one kind, or of all, except the collector's own."""
    store = root / "store"
    found = {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()} - {COLLECTOR}
    return {name for name in found if f"/{kind}" in name}


def kinds(root: Path) -> dict[str, int]:
    """Return the number of objects of each kind."""
    found = [name.split("/")[1] for name in objects(root)]
    return {kind: found.count(kind) for kind in ("blocks", "holders", "sessions", "manifests") if kind in found}


def manifests(root: Path) -> set[str]:
    """Return the last part of the name of each manifest: its ref where names are not encrypted."""
    return {name.rpartition("/")[2] for name in objects(root, "manifests/")}


def sessions(root: Path) -> set[str]:
    """Return the sessions that have objects."""
    return {name.split("/")[2] for name in objects(root, "sessions/")}


def flip_last_bytes(root: Path) -> None:
    """Change the last byte of each block."""
    for name in objects(root, "blocks/"):
        path = root / "store" / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
