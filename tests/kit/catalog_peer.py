"""Another sidecar as a pull sees it, without a wire: its catalog is asked directly. Passes tests/contract's suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from contextcache.clock import ManualClock
from contextcache.errors import SidecarUnavailable
from contextcache.model import Manifest
from kv_sidecar.moving.pulling import Peer, PulledFile
from kv_sidecar.sealed.prefixes import Found, PrefixQuestion
from kv_sidecar.tiers.store import Buffer
from tests.kit.kv_blocks import FINGERPRINT, SidecarUnderTest


class CatalogPeer(Peer):
    """Hands out what `kv` holds; stops, lies or breaks where a test wants it to."""

    def __init__(self, kv: SidecarUnderTest) -> None:
        self._kv = kv
        self.asked: list[str] = []
        """cache_refs asked for."""
        self.sent: list[tuple[int, int]] = []
        self.released: Callable[[int], None] = lambda index: None
        """(rank, position) of the block files handed out."""
        self.num_open = 0
        """Connections made and not closed."""
        self.hold_match = _open_gate()
        self.hold_manifest = _open_gate()
        self.hold_block = _open_gate()
        """A closed gate stops every block that is not free."""
        self.is_free: Callable[[int, int], bool] = lambda rank, index: not self.sent
        """Of a rank and a position: the first block that is sent at all."""
        self.arrived = asyncio.Event()
        """Set when somebody stands before a closed gate."""
        self.breaks = False
        """Fail after the first block."""
        self.change_manifest: Callable[[Manifest], Manifest] = lambda manifest: manifest
        self.change_block: Callable[[Buffer], Buffer] = lambda data: data

    def connect(self, address: str, timeout_s: float) -> CatalogPeer:
        self.num_open += 1
        return self

    async def manifest(self, tenant: str, cache_ref: str) -> Manifest:
        self.asked.append(cache_ref)
        await self._pass(self.hold_manifest)
        return self.change_manifest(await self._kv.catalog.open(tenant, cache_ref))

    async def match(self, question: PrefixQuestion, tokens_min: int) -> Sequence[Found]:
        await self._pass(self.hold_match)
        return await self._kv.catalog.match_prefix(replace(question, tokens_min=tokens_min))

    async def block_files(
        self, manifest: Manifest, rank: int, block_indices: Sequence[int]
    ) -> AsyncGenerator[PulledFile, None]:
        blocks = self._kv.catalog.load(
            await self._kv.catalog.open(manifest.tenant, manifest.cache_ref),
            manifest.fingerprint,
            rank,
            block_indices,
            in_slots=False,
        )
        async with aclosing(blocks):
            async for block in (block async for together in blocks for block in together):
                if self.sent and self.breaks:
                    raise SidecarUnavailable("the peer is gone")
                if not self.is_free(rank, block.block_index):
                    await self._pass(self.hold_block)
                self.sent.append((rank, block.block_index))
                yield PulledFile(
                    block.block_index, bytes(self.change_block(block.data)), partial(self.released, block.block_index)
                )

    async def close(self) -> None:
        self.num_open -= 1

    async def _pass(self, gate: asyncio.Event) -> None:
        if not gate.is_set():
            self.arrived.set()
        await gate.wait()


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass
class PeerPods:
    """Two sidecars: `here` may pull from `there` by way of `peer`."""

    here: SidecarUnderTest
    there: SidecarUnderTest
    peer: CatalogPeer
    clock: ManualClock

    async def ended(self) -> None:
        """Return when no pull is going on."""
        await asyncio.gather(*self.here.sidecar.pulls._tasks, return_exceptions=True)


Pods = TypeVar("Pods", bound=PeerPods)


@asynccontextmanager
async def peer_pods(root: Path, kind: type[Pods], **settings: Any) -> AsyncIterator[Pods]:
    """Run two sidecars. `settings`: of `here`, which has an engine of one rank."""
    clock = ManualClock()
    async with SidecarUnderTest(root / "there", clock=clock) as there:
        peer = CatalogPeer(there)
        settings = {"connect_peer": peer.connect, "peers": ("10.0.0.0/24",), **settings}
        async with SidecarUnderTest(root / "here", clock=clock, **settings) as here:
            here.sidecar.engine.introduce(0, 1, FINGERPRINT, "")
            yield kind(here, there, peer, clock)
