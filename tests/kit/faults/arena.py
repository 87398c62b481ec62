"""Copies in a sidecar's arena, seen as an engine sees them: named by the sidecar, and changed behind its back."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from contextcache.clock import SystemClock
from contextcache.model import Manifest
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.messages import message_of
from kv_sidecar.client import EngineSidecarClient, MappedArena, open_arena, pack_token_ids
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import rank_keys
from tests.kit.faults import files
from tests.kit.kv_blocks import new_save
from tests.kit.until import wait_until

FAULTS = (
    "flip_data_bit",
    "flip_last_bit",
    "flip_header_bit",
    "flip_length_bit",
    "swap_whole",
    "swap_data",
    "rewrite_data",
    "zero",
)
"""Of files.FAULTS, those that a slot can suffer: its bytes change, its place and length do not."""
_CALL_S = 30.0
_LEASE_MS = 60_000


@contextmanager
def copies(client: EngineSidecarClient, arena: MappedArena, manifest: Manifest) -> Iterator[dict[BlockKey, memoryview]]:
    """Have the slots of a context named and kept in place; what is only on disk comes into one, if there is room."""
    keys = rank_keys(manifest, 0)
    request = pb.LoadBlocksRequest(
        tenant=manifest.tenant,
        cache_ref=manifest.cache_ref,
        fingerprint=manifest.fingerprint,
        rank=0,
        block_indices=range(len(keys)),
        borrower=arena.borrower,
        lease_id=secrets.token_hex(16),
        lease_ms=_LEASE_MS,
    )
    try:
        yield {
            keys[answer.block_index]: arena.view(answer.slot.offset, answer.slot.size_bytes)
            for whole in client.load_blocks(request, _CALL_S)
            for answer in (whole, *whole.more)
            if answer.WhichOneof("payload") == "slot"
        }
    finally:
        client.end_load(request.lease_id)


class Onlooker:
    """Has borrowed the arena of a sidecar without introducing itself: the sidecar's engine stays who it is."""

    def __init__(self, address: str) -> None:
        self._client = EngineSidecarClient(address, timeout_s=_CALL_S)
        self._arena = open_arena(address, lambda: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    @contextmanager
    def copies(self, manifest: Manifest) -> Iterator[dict[BlockKey, memoryview]]:
        """As the function."""
        with copies(self._client, self._arena, manifest) as found:
            yield found

    def drop_all(self) -> None:
        """Empty the memory tier, without a restart or a fault: one file of the region's whole size is lent room.

        Every block leaves for it, and it is given back. Waits for what is pinned or lent to others.
        """
        new = new_save((1,), now_ms=SystemClock().now_ms())
        self._client.prepare_save(
            message_of(pb.PrepareSaveRequest, new, token_ids=pack_token_ids(new.token_ids)), _CALL_S
        )
        request = pb.LendSlotsRequest(
            borrower=self._arena.borrower,
            cache_ref=new.cache_ref,
            rank=0,
            block_indices=[0],
            sizes_bytes=[self._arena.size_bytes],
            timeout_ms=1000,
        )
        slots = wait_until(lambda: self._client.lend_slots(request, _CALL_S), what="nobody needs the arena")
        self._client.return_slots(self._arena.borrower, [slot.slot_id for slot in slots])
        self._client.abandon_save(new.tenant, new.cache_ref, "internal_error", started_at_ms=0)


def spoil(copy: memoryview, other: memoryview, fault: str) -> None:
    """Let a slot suffer what a file would; `other`: a copy of the same kind and length."""
    with tempfile.TemporaryDirectory(prefix="slot-") as directory:
        path, other_path = Path(directory, "slot"), Path(directory, "other")
        path.write_bytes(copy)
        other_path.write_bytes(other)
        files.FAULTS[fault](path, other_path)
        copy[:] = path.read_bytes()
