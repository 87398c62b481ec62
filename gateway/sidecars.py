"""The doors to the pods' kv-sidecars, and what those say of themselves, asked in the background. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from typing_extensions import override

from contextcache.errors import ContextCacheError
from contextcache.v1 import kv_sidecar_pb2 as pb
from gateway.endpoints import WatchedEndpoints
from gateway.metrics import Metrics
from gateway.ports import KVSidecar
from kv_sidecar.client import TIER_NAMES

log = logging.getLogger(__name__)


class SidecarClient(KVSidecar, Protocol):
    """A door that can be closed, to a sidecar that can be asked how it does."""

    async def stats(self) -> pb.StatsResponse:
        """Return contexts, blocks and bytes by tier, and the engine's fingerprints. Raises SidecarUnavailable."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class Sidecars(Mapping[str, KVSidecar]):
    """Clients by the name of their endpoint; opened when first needed, closed when no endpoint has their address."""

    def __init__(
        self,
        endpoints: WatchedEndpoints,
        connect: Callable[[str], SidecarClient],
        *,
        metrics: Metrics,
        interval_s: float = 5.0,
        timeout_s: float = 1.0,
    ) -> None:
        """`connect` makes a client of a gRPC address, without waiting."""
        self._endpoints = endpoints
        self._connect = connect
        self._metrics = metrics
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clients: dict[str, SidecarClient] = {}

    @override
    def __getitem__(self, name: str) -> KVSidecar:
        endpoint = self._endpoints.endpoint(name)
        if endpoint is None or not endpoint.sidecar:
            raise KeyError(name)
        return self._client(endpoint.sidecar)

    @override
    def __iter__(self) -> Iterator[str]:
        return (state.endpoint.name for state in self._endpoints.states() if state.endpoint.sidecar)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    async def run(self) -> None:
        """Ask all sidecars again and again until cancelled."""
        while True:
            try:
                await self.ask_all()
            except Exception:
                # The loop must live: without it connections to pods long gone would stay.
                self._metrics.probe_failures.inc()
                log.exception("round of the sidecars failed")
            await asyncio.sleep(self._interval_s)

    async def ask_all(self) -> None:
        """Ask every sidecar once, all at the same time, and close what is no longer needed."""
        listed = {state.endpoint.name: state.endpoint.sidecar for state in self._endpoints.states()}
        asked = (self._ask(name, address) for name, address in listed.items() if address)
        found = await asyncio.gather(*asked, return_exceptions=True)
        kept = {state.endpoint.sidecar for state in self._endpoints.states()}
        gone = [self._clients.pop(address) for address in list(self._clients) if address not in kept]
        await asyncio.gather(*map(self._close_one, gone))
        for fault in found:
            if fault is not None:
                raise fault

    async def close(self) -> None:
        """Close every connection."""
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*map(self._close_one, clients))

    async def _ask(self, name: str, address: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                stats = await self._client(address).stats()
        except (ContextCacheError, TimeoutError):
            self._endpoints.note_sidecar(name, fingerprint="", tiers=frozenset())
            return
        tiers = frozenset(TIER_NAMES[found.tier] for found in stats.tiers if found.tier in TIER_NAMES)
        self._endpoints.note_sidecar(name, fingerprint=",".join(stats.fingerprints), tiers=tiers)

    async def _close_one(self, client: SidecarClient) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.close()
        except TimeoutError:
            log.warning("a sidecar's connection did not close in time")

    def _client(self, address: str) -> SidecarClient:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = self._connect(address)
        return client
