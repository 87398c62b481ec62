"""What an engine rank does with a sidecar, over real gRPC, with small made-up pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from contextcache.clock import SystemClock
from contextcache.model import Manifest
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.messages import message_of
from kv_sidecar.client import EngineSidecarClient, open_arena, pack_token_ids, parse_block_file
from kv_sidecar.format.manifest import block_meta, num_files
from kv_sidecar.saves import NewSave
from tests.kit.kv_blocks import (
    FINGERPRINT,
    PAGE_BYTES,
    block_file_bytes,
    fill_of,
    new_save,
    planned,
)

FRAME_BYTES = 100
"""Far below the 1 MiB of the contract, so that small blocks have many frames."""


class EngineRank:
    """One rank with a client of its own; saves in slots when the sidecar has an arena, else in frames."""

    def __init__(self, address: str, *, frames: bool = False, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.client = EngineSidecarClient(address, timeout_s=60)
        self.terms = self.client.handshake(FINGERPRINT, "", 0, 1)
        self.arena = open_arena(address, lambda: None) if self.terms.arena and not frames else None

    def close(self) -> None:
        self.client.close()
        self.arena = None

    def prepare(self, new: NewSave) -> pb.PrepareSaveResponse:
        return self.client.prepare_save(
            message_of(pb.PrepareSaveRequest, new, token_ids=pack_token_ids(new.token_ids)), 60
        )

    def save(self, token_ids: tuple[int, ...], *, session_id: str = "ctx_1") -> NewSave:
        new = new_save(token_ids, now_ms=SystemClock().now_ms(), session_id=session_id)
        self.send(new)
        return new

    def send(self, new: NewSave) -> None:
        """Announce a save, send what is missing and seal it."""
        prepared = self.prepare(new)
        wanted = list(prepared.missing_files)
        taken = self.client.save_blocks(self.requests(new, wanted), timeout_s=60)
        assert taken.num_blocks == len(wanted)
        assert self.client.seal(new.cache_ref, new.rank, 60)

    def requests(self, new: NewSave, wanted: list[int]) -> Iterator[pb.SaveBlocksRequest]:
        manifest = planned(new, block_tokens=self.terms.block_tokens)
        for index in wanted:
            meta = block_meta(manifest, index, new.rank)
            place = {"cache_ref": new.cache_ref, "rank": new.rank, "block_index": index}
            data = block_file_bytes(meta, page_bytes=self.page_bytes)
            if self.arena is not None:
                slot = pb.SavedSlot(block_index=index, slot_id=self.fill_slot(place, data))
                yield pb.SaveBlocksRequest(cache_ref=new.cache_ref, rank=new.rank, slots=[slot])
                continue
            for start in range(0, len(data), FRAME_BYTES):
                last = start + FRAME_BYTES >= len(data)
                yield pb.SaveBlocksRequest(**place, frame=data[start : start + FRAME_BYTES], last_frame=last)

    def fill_slot(self, place: dict[str, Any], data: bytes) -> int:
        """Write a file to a slot for it; return the slot's id."""
        (slot,) = self.lend(place, len(data))
        self.view(slot)[:] = data
        return slot.slot_id

    def lend(self, place: dict[str, Any], size_bytes: int, *, timeout_ms: int = 1000) -> Sequence[pb.Slot]:
        """Ask for a slot; empty when there is no room."""
        assert self.arena is not None
        request = pb.LendSlotsRequest(
            borrower=self.arena.borrower,
            cache_ref=place["cache_ref"],
            rank=place["rank"],
            block_indices=[place["block_index"]],
            sizes_bytes=[size_bytes],
            timeout_ms=timeout_ms,
        )
        return self.client.lend_slots(request, 60)

    def view(self, slot: pb.Slot) -> memoryview:
        assert self.arena is not None
        return self.arena.view(slot.offset, slot.size_bytes)

    def load(self, new: NewSave) -> set[int]:
        """Load everything, check every byte, return the tiers."""
        manifest, _ = self.client.get_manifest(new.tenant, new.cache_ref, 10)
        assert manifest.token_ids == new.token_ids
        return self.load_files(manifest, new.rank)

    def load_files(self, manifest: Manifest, rank: int = 0) -> set[int]:
        """Load all that a manifest names, check every byte, return the tiers."""
        request = pb.LoadBlocksRequest(
            tenant=manifest.tenant,
            cache_ref=manifest.cache_ref,
            fingerprint=manifest.fingerprint,
            rank=rank,
            block_indices=range(num_files(manifest)),
            borrower="" if self.arena is None else self.arena.borrower,
        )
        tiers, data, done = set(), bytearray(), []
        answers = self.client.load_blocks(request, 10)
        for response in (one for answer in answers for one in (answer, *answer.more)):
            tiers.add(response.tier)
            if response.WhichOneof("payload") == "slot":
                file = parse_block_file(self.view(response.slot))
            else:
                data += response.frame
                if not response.last_frame:
                    continue
                file, data = parse_block_file(data), bytearray()
            expected = block_meta(manifest, response.block_index, rank)
            file.verify(expected)
            assert np.all(file.pages == fill_of(expected))
            file.close()
            done.append(response.block_index)
        assert done == list(range(num_files(manifest)))
        return tiers
