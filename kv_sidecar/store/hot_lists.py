"""What each pod leaves in the shared store about the contexts it used last, and who takes that over from it.

Objects (docs/project/formats.md), by hashes of the fingerprint of the engine whose KV it is, and of the pod's name:

    .hot/<engine>/<pod>.living   its list, written again and again: an old one is of a pod that is gone
    .hot/<engine>/<pod>.left     the same, of a pod that has ended
    .hot/<engine>/<pod>.taken    empty: a pod takes this list over; made by one alone

A list tells what may be worth a look. It is never believed: the manager says where a context is, and what comes from
the store is verified. Two pods that take the same list do some work twice. All ages are by the store's own clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from contextcache.errors import CorruptBlock
from contextcache.model import SessionId, TenantId
from contextcache.names import SESSION_ID_PATTERN, TENANT_PATTERN
from kv_sidecar.store.objects import ObjectStore, StoredObject

DIRECTORY = ".hot"
"""No tenant's name."""
LISTED_MAX = 256
_LIST_BYTES_MAX = 1 << 20
_LIVING, _LEFT, _TAKEN = "living", "left", "taken"
_CLAIMS_MAX = 3
"""Lists that one look tries to take."""

_Tenant = Annotated[str, StringConstraints(pattern=f"^(?:{TENANT_PATTERN.pattern})$")]
_Session = Annotated[str, StringConstraints(pattern=f"^(?:{SESSION_ID_PATTERN.pattern})$")]


class HotList(BaseModel, frozen=True):
    """What one pod used last."""

    endpoint: str = Field(min_length=1, max_length=256)
    """The pod, as sessions name their holder."""
    contexts: tuple[tuple[_Tenant, _Session], ...] = Field(max_length=LISTED_MAX)
    """The one used last first."""


class HotLists:
    """One pod's view of them. All calls raise SidecarUnavailable when the store does not work."""

    def __init__(self, objects: ObjectStore, *, endpoint: str, gone_after_s: float) -> None:
        """`gone_after_s`: age from which a list that is written again and again is of a pod that is gone."""
        self._objects = objects
        self._endpoint = endpoint
        self._gone_after_ms = gone_after_s * 1000

    async def write(self, fingerprint: str, contexts: Sequence[tuple[TenantId, SessionId]], *, leaves: bool) -> None:
        """Write this pod's list, of at most `LISTED_MAX`; `leaves`: it ends, and whoever starts may take it now."""
        data = HotList(endpoint=self._endpoint, contexts=tuple(contexts)).model_dump_json().encode()
        mine = _name(fingerprint, self._endpoint)
        await self._objects.put(f"{mine}.{_LEFT if leaves else _LIVING}", data)
        if leaves:
            await self._objects.delete(f"{mine}.{_LIVING}")

    async def take_own(self, fingerprint: str) -> HotList | None:
        """Take the list that a pod of this name has left, before `write` replaces it."""
        return await self._take(_name(fingerprint, self._endpoint))

    async def take(self, fingerprint: str) -> HotList | None:
        """Take the list of some pod that is gone; None: there is none, or others were first."""
        found = [it async for it in self._objects.listed(_directory(fingerprint))]
        mine = _name(fingerprint, self._endpoint)
        now_ms = max((it.modified_at_ms for it in found if it.name == f"{mine}.{_LIVING}"), default=0)
        gone = {it.name.rpartition(".")[0] for it in found if self._is_gone(it, now_ms)}
        free = sorted(gone - {mine})
        # By chance: many that start at once would all begin with the first one.
        for name in random.sample(free, min(len(free), _CLAIMS_MAX)):  # no secret
            if await self._objects.create(f"{name}.{_TAKEN}", b""):
                try:
                    taken_over = await self._take(name)
                finally:
                    await self._objects.delete(f"{name}.{_TAKEN}")
                if taken_over is not None:
                    return taken_over
        return None

    def _is_gone(self, stored: StoredObject, now_ms: int) -> bool:
        """Return whether an object says that its pod is gone; `now_ms`: when this pod wrote last."""
        is_old = stored.name.endswith(f".{_LIVING}") and now_ms - stored.modified_at_ms > self._gone_after_ms
        return is_old or stored.name.endswith(f".{_LEFT}")

    async def _take(self, name: str) -> HotList | None:
        """Read a list and remove it."""
        found: HotList | None = None
        for kind in (_LIVING, _LEFT):
            try:
                if (data := await self._objects.get(f"{name}.{kind}", limit_bytes=_LIST_BYTES_MAX)) is None:
                    continue
                found = HotList.model_validate_json(bytes(data))
            except (CorruptBlock, ValidationError):
                pass
            await self._objects.delete(f"{name}.{kind}")
        return found


def _directory(fingerprint: str) -> str:
    return f"{DIRECTORY}/{_hash(fingerprint)}/"


def _name(fingerprint: str, endpoint: str) -> str:
    return f"{_directory(fingerprint)}{_hash(endpoint)}"


def _hash(text: str) -> str:
    """Return a text as a part of a name: it may be anything."""
    return sha256(text.encode()).hexdigest()[:32]
