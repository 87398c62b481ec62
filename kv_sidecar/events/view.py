"""The blocks that subscribers know of, and the events that change it into the blocks that are here. No I/O.

Rules:
1. The block records alone decide. A block is here if the records of all ranks are stored and a manifest names them.
2. Tenants that are not listed are left out entirely: token ids are their prompts, and a hash confirms a guessed prompt.
3. KV of an adapter is left out: its requests have the adapter's name, which the sidecar does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias

from contextcache.model import KVFile, KVGroup, Manifest
from kv_sidecar.blocks import Blocks
from kv_sidecar.format.ids import ADAPTER_MARK, TOKEN_BYTES, BlockKey, pack_token_ids, unpack_token_ids
from kv_sidecar.format.manifest import file_key

ALL_TENANTS = "*"
Medium: TypeAlias = Literal["STORAGE", "CPU"]
_MEDIA: tuple[Medium, ...] = ("STORAGE", "CPU")
"""The disk, then the arena, whose blocks are all on disk too. A parent is on disk as long as its child is anywhere."""
Event: TypeAlias = dict[str, Any]
"""One event in the fields of vLLM 0.32 (`vllm.distributed.kv_events`): a map with its class under `type`."""
CLEARED: Event = {"type": "AllBlocksCleared"}


@dataclass(slots=True)
class _Known:
    """A block that a manifest of a listed tenant names."""

    keys: tuple[BlockKey, ...]
    """Its files, one for each rank."""
    file: KVFile
    group: KVGroup
    token_ids: bytes
    """Packed: 1 KiB for 256 tokens, whose KV has some MiB."""
    media: tuple[Medium, ...] = ()
    """Tiers that have it, as subscribers know."""

    def stored(self, media: Iterable[Medium]) -> Iterator[Event]:
        """Yield its events for these tiers. Usable in any thread."""
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [_number(self.file.name)],
            "parent_block_hash": _number(self.file.parent) if self.file.parent else None,
            "token_ids": unpack_token_ids(self.token_ids),
            "block_size": self.group.block_tokens,
            "lora_id": None,
            "lora_name": None,
            "group_idx": self.file.group,
            "kv_cache_spec_kind": self.group.kind,
            "locality": "LOCAL",
        }
        if self.group.window:
            event["kv_cache_spec_sliding_window"] = self.group.window
        for medium in media:
            yield event | {"medium": medium}


class EventView:
    """What has been published. Used from one event loop, once the stores are open."""

    def __init__(self, blocks: Blocks, tenants: Collection[str]) -> None:
        self._records, self._tenants = blocks, tenants
        self._known: dict[tuple[str, str], _Known] = {}
        """By block id and group, a parent before its children: a router refuses a block with an unknown parent."""
        self._changed: dict[tuple[str, str], None] = {}
        """Blocks whose records have changed since the last event; each is known."""
        self.changed = asyncio.Event()
        blocks.watch(self._note)

    def learn(self, manifest: Manifest) -> None:
        """Remember the tokens of a manifest's whole blocks. Tails are of one context alone, so no router asks for them.

        Called before its record refers to them, while the sidecar starts also in a thread.
        """
        is_listed = ALL_TENANTS in self._tenants or manifest.tenant in self._tenants
        if not is_listed or ADAPTER_MARK in manifest.fingerprint:
            return
        digests = [group.digest for group in manifest.groups]
        new = [it for it in manifest.files if it.kind == "block" and (it.name, digests[it.group]) not in self._known]
        if not new:
            return
        first = min(it.first_token for it in new)
        token_ids = pack_token_ids(manifest.token_ids[first:])
        for it in new:
            keys = tuple([file_key(it, digests[it.group], rank) for rank in range(manifest.world_size)])
            own = token_ids[(it.first_token - first) * TOKEN_BYTES : (it.end_token - first) * TOKEN_BYTES]
            self._known[it.name, digests[it.group]] = _Known(keys, it, manifest.groups[it.group], own)

    def take(self, blocks_max: int) -> list[Event]:
        """Return the events of the next changed blocks; subscribers know them from now on."""
        names = list(islice(self._changed, blocks_max))
        removed: dict[tuple[Medium, int], list[int]] = {}
        events: list[Event] = []
        for name in names:
            del self._changed[name]
            known = self._known[name]
            media = self._media(known)
            for medium in [medium for medium in known.media if medium not in media]:
                removed.setdefault((medium, known.file.group), []).append(_number(known.file.name))
            if more := [medium for medium in media if medium not in known.media]:
                events += known.stored(more)
            known.media = media
            if not media and not any(self._records.get(key).refs.is_sealed for key in known.keys):
                del self._known[name]
        if not self._changed:
            self.changed.clear()
        gone = [
            {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group, "locality": "LOCAL"}
            for (medium, group), hashes in removed.items()
        ]
        return gone + events

    def snapshot(self) -> list[Iterator[Event]]:
        """Return the events of all blocks that subscribers know, one iterator for each block."""
        return [known.stored(known.media) for known in self._known.values() if known.media]

    def _note(self, key: BlockKey) -> None:
        name = key.name, key.group
        if name in self._known:
            self._changed[name] = None
            self.changed.set()

    def _media(self, known: _Known) -> tuple[Medium, ...]:
        records = [self._records.get(key) for key in known.keys]
        if not all(record.is_stored and record.refs.is_sealed for record in records):
            return ()
        return _MEDIA if all(record.in_memory for record in records) else _MEDIA[:1]


def _number(block_id: str) -> int:
    """Return the last 64 bits of a block id, as vLLM has hashes in its events by default."""
    return int(block_id[-16:], 16)
