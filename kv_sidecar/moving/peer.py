"""Where a pull fetches from: another sidecar, whose block files are put together from frames, or the shared store.

Only sizes and numbers are checked here: whether a file is the one that belongs there is seen where it is taken in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio

from contextcache.errors import CacheRefNotFound, CorruptBlock, InvalidRequest, SidecarUnavailable
from contextcache.model import CacheRef, Manifest, TenantId
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.v1 import kv_sidecar_pb2_grpc as pb_grpc
from contextcache.wire.channels import open_channel
from contextcache.wire.messages import value_of
from contextcache.wire.rpc import Answer, answer_of, error_from_rpc
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import trace_metadata
from kv_sidecar.format.ids import TOKEN_BYTES, pack_token_ids
from kv_sidecar.format.manifest import block_key, with_files
from kv_sidecar.limits import Limits
from kv_sidecar.moving.pulling import PulledFile
from kv_sidecar.sealed.prefixes import Found, PrefixQuestion, common
from kv_sidecar.store.writer import SharedTier
from kv_sidecar.tiers.store import BLOCK_BYTES_MAX

STREAMS_MAX = 4
"""Block files assembled from frames at once; further streams wait. Each holds up to 256 MiB."""
Place: TypeAlias = tuple[CacheRef, int, int]
"""cache_ref, rank, block index."""
FILES_AT_ONCE = 4
"""Files that one pull fetches from the store side by side."""


class PeerSidecar:
    """Another sidecar, over a connection of its own; satisfies pulling.Peer."""

    def __init__(
        self,
        address: str,
        timeout_s: float,
        *,
        limits: Limits,
        slots: asyncio.Semaphore,
        tls: WatchedTls | None = None,
    ) -> None:
        """`address` is `host:port`; `slots` bound how many block files are held at once."""
        # The resolver is named, so that no host name can be read as the scheme of another kind of address.
        self._channel = open_channel(f"dns:///{address}", tls=tls)
        self._stub: pb_grpc.KVSidecarServiceAsyncStub = pb_grpc.KVSidecarServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._limits = limits
        self._slots = slots

    async def manifest(self, tenant: TenantId, cache_ref: CacheRef) -> Manifest:
        """See pulling.Peer."""
        timeout_s = min(self._timeout_s, self._limits.manifest_timeout_s)
        answer = await _told(
            self._stub.GetManifest, pb.GetManifestRequest(tenant=tenant, cache_ref=cache_ref), timeout_s
        )
        try:
            # In a thread, as the names of a long context's blocks take a while.
            return await asyncio.to_thread(lambda: with_files(value_of(Manifest, answer.manifest)))
        except InvalidRequest as exc:
            raise CorruptBlock("the peer sent an invalid manifest") from exc

    async def match(self, question: PrefixQuestion, tokens_min: int) -> Sequence[Found]:
        """See pulling.Peer."""
        request = pb.MatchPrefixRequest(
            tenant=question.tenant,
            fingerprint=question.fingerprint,
            token_ids=question.token_ids,
            tokens_min=tokens_min,
        )
        answer = await _told(self._stub.MatchPrefix, request, self._timeout_s)
        return [Found(match.cache_ref, match.num_tokens, is_whole=match.whole) for match in answer.matches]

    async def block_files(
        self, manifest: Manifest, rank: int, block_indices: Sequence[int]
    ) -> AsyncGenerator[PulledFile, None]:
        """See pulling.Peer."""
        request = pb.LoadBlocksRequest(
            tenant=manifest.tenant,
            cache_ref=manifest.cache_ref,
            fingerprint=manifest.fingerprint,
            rank=rank,
            block_indices=block_indices,
        )
        timeout_s = self._timeout_s + manifest.size_bytes / self._limits.pull_bytes_per_s_min
        call: Any = self._stub.LoadBlocks(request, timeout=timeout_s, metadata=trace_metadata())
        wanted = list(block_indices)
        try:
            with closing(FrameAssembly(self._slots, limit_bytes=BLOCK_BYTES_MAX)) as frames:
                async for response in call:
                    if not wanted:
                        raise CorruptBlock("the peer sent more blocks than the pull requested")
                    place = (manifest.cache_ref, rank, response.block_index)
                    data = await frames.add(place, response.frame, last=response.last_frame)
                    if data is not None:
                        yield PulledFile(wanted.pop(0), data, frames.hand_over())
        except grpc.RpcError as exc:
            raise error_from_rpc(exc, unavailable=SidecarUnavailable) from exc
        except InvalidRequest as exc:
            raise CorruptBlock("the peer sent more bytes than a block has") from exc
        finally:
            call.cancel()
        if wanted:
            raise CorruptBlock("the peer sent fewer blocks than the pull requested")

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


async def _told(method: Callable[..., Awaitable[Answer]], request: object, timeout_s: float) -> Answer:
    call = method(request, timeout=timeout_s, metadata=trace_metadata())
    return await answer_of(call, timeout_s, unavailable=SidecarUnavailable)


@dataclass(frozen=True)
class StoredPeer:
    """The shared store as the source of a pull; satisfies pulling.Peer."""

    shared: SharedTier
    slots: asyncio.Semaphore
    """Bounds how many block files are held at once."""

    async def manifest(self, tenant: TenantId, cache_ref: CacheRef) -> Manifest:
        """See pulling.Peer."""
        return await self.shared.manifest(tenant, cache_ref)

    async def match(self, question: PrefixQuestion, tokens_min: int) -> Sequence[Found]:
        """See pulling.Peer. Searches the asking conversation only, because a store is not searched by tokens.

        KV that cannot be cut matches only if the prompt begins with all of it.
        """
        there = await self.shared.of_group(question.tenant, question.group)
        # In a thread, as the tokens of long contexts take a while.
        found = await asyncio.to_thread(lambda: [_found(it, question) for it in there])
        useful = [one for one in found if one is not None and one.num_tokens >= tokens_min]
        return sorted(useful, key=lambda one: one.num_tokens, reverse=True)

    async def block_files(
        self, manifest: Manifest, rank: int, block_indices: Sequence[int]
    ) -> AsyncGenerator[PulledFile, None]:
        """See pulling.Peer. Some are fetched ahead of the one that is asked for."""
        waiting = deque(block_indices)
        ahead: deque[asyncio.Task[PulledFile]] = deque()
        try:
            while waiting or ahead:
                while waiting and len(ahead) < FILES_AT_ONCE:
                    ahead.append(asyncio.create_task(self._fetched(manifest, rank, waiting.popleft())))
                file = await ahead[0]  # still ours, should we be cancelled in this very moment
                ahead.popleft()
                yield file
        except CacheRefNotFound:
            # The block will not come back: the next question must be a miss at once.
            name = (manifest.tenant, manifest.session_id, [manifest.cache_ref])
            self.shared.delete_later(self.shared.begin_delete(*name, is_whole=False))
            raise
        finally:
            for task in ahead:
                task.cancel()
            for end in await asyncio.gather(*ahead, return_exceptions=True):
                if isinstance(end, PulledFile):
                    end.release()

    async def _fetched(self, manifest: Manifest, rank: int, index: int) -> PulledFile:
        await self.slots.acquire()
        try:
            data = await self.shared.stored.block(manifest.tenant, block_key(manifest, index, rank))
        except BaseException:
            self.slots.release()
            raise
        return PulledFile(index, data, self.slots.release)

    async def close(self) -> None:
        """Do nothing: the store stays open."""


def _found(manifest: Manifest, question: PrefixQuestion) -> Found | None:
    shared = common(pack_token_ids(manifest.token_ids), question.token_ids) // TOKEN_BYTES
    is_whole = shared == len(manifest.token_ids)
    is_plain = all(group.kind == "full_attention" for group in manifest.groups)
    if manifest.fingerprint != question.fingerprint or not (is_whole or is_plain):
        return None
    return Found(manifest.cache_ref, shared, is_whole=is_whole)


@dataclass(slots=True)
class FrameAssembly:
    """The frames of one stream. Holds a slot while a file is on its way, so that memory is bounded over all streams."""

    slots: asyncio.Semaphore
    limit_bytes: int
    _place: Place | None = None
    _data: bytearray = field(default_factory=bytearray)

    async def add(self, place: Place, frame: bytes, *, last: bool) -> bytearray | None:
        """Append a frame; return the whole file after its last one, to be used before `close()`.

        Raises InvalidRequest when the file is too large or another's frame comes in between.
        """
        if self._place is None:
            await self.slots.acquire()
            self._place = place
        if place != self._place:
            raise InvalidRequest("a block file began before the previous one ended")
        if len(self._data) + len(frame) > self.limit_bytes:
            raise InvalidRequest(f"the block file has more than {self.limit_bytes} bytes")
        self._data += frame
        return self._data if last else None

    def hand_over(self) -> Callable[[], None]:
        """Forget the file, whose slot is the caller's from now on; return the function that frees the slot."""
        assert self._place is not None, "there is no file"
        self._place = None
        self._data = bytearray()
        return self.slots.release

    def close(self) -> None:
        """Forget the file and let another stream go on. Harmless when there is none."""
        if self._place is not None:
            self._place = None
            self._data = bytearray()
            self.slots.release()

    def check_finished(self) -> None:
        """Raise InvalidRequest when the stream ended inside a file."""
        if self._place is not None:
            raise InvalidRequest("the stream ended before the last frame")
