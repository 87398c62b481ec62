"""LMCache's place at the gateway's table: the calls of a kv-sidecar that a gateway makes, answered by this process.

A gateway deletes, touches and looks at a context's KV at the pods that hold it, by the sidecar's gRPC service. Where
LMCache keeps the KV there is no sidecar, so the turn's process answers: what LMCache can do is done, what it cannot
is said (no manifest, no fork, no pull, nothing kept of plain requests). No engine of ours calls here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message
from typing_extensions import override

from contextcache.clock import Clock
from contextcache.errors import CacheRefNotFound
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.servers import bind, plain_server
from contextcache.wire.tls import WatchedTls
from integrations.lmcache.api import LMCacheApi
from integrations.lmcache.instead_of_sidecar import LMCacheKV
from kv_sidecar.client import SERVICE_NAME

log = logging.getLogger(__name__)

_CALLS_MAX = 256
_GRACE_S = 1.0

Behaviour: TypeAlias = Callable[[Any, Any], Awaitable[Message]]


class LMCacheDoor(LMCacheKV):
    """LMCacheKV that gateways reach too, from `start` to `close`."""

    def __init__(self, api: LMCacheApi, *, secret: bytes, clock: Clock, address: str, tls: WatchedTls | None) -> None:
        """`address`: where the gateway expects the pod's sidecar. With `tls` only parts of the deployment may call."""
        super().__init__(api, secret=secret, clock=clock)
        self._address = address
        self._tls = tls
        self._server: grpc.aio.Server | None = None
        self.port = 0
        """Where it listens; 0: it does not."""

    @override
    async def start(self) -> None:
        """Listen. Of several API servers of one pod the first one does; it deletes what the others saved as well."""
        await super().start()
        if self._server is not None:
            return
        try:
            server = plain_server(max_concurrent_rpcs=_CALLS_MAX, tls=self._tls)
            _Calls(self).add_to(server)
            self.port = bind(server, self._address, tls=self._tls)
        except OSError:
            log.warning("another process answers the gateway", extra={"address": self._address})
            return
        await server.start()
        self._server = server

    @override
    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(_GRACE_S)
        await super().close()


class _Calls:
    """What is not here answers UNIMPLEMENTED."""

    def __init__(self, lmcache: LMCacheKV) -> None:
        self._lmcache = lmcache

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve them under the sidecar's name."""
        calls: dict[str, tuple[Behaviour, type[Message], type[Message]]] = {
            "DeleteContext": (self._delete, pb.DeleteContextRequest, pb.DeleteContextResponse),
            "TouchContext": (self._touch, pb.TouchContextRequest, pb.TouchContextResponse),
            "WaitSealed": (self._wait_sealed, pb.WaitSealedRequest, pb.WaitSealedResponse),
            "GetManifest": (self._no_manifest, pb.GetManifestRequest, pb.GetManifestResponse),
            "ForkContext": (self._no_fork, pb.ForkContextRequest, pb.ForkContextResponse),
            "PullContext": (self._no_pull, pb.PullContextRequest, pb.PullContextResponse),
            "ListKept": (self._nothing_kept, pb.ListKeptRequest, pb.ListKeptResponse),
            "Stats": (self._no_stats, pb.StatsRequest, pb.StatsResponse),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(behaviour, asked.FromString, told.SerializeToString)
            for name, (behaviour, asked, told) in calls.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def _delete(self, request: pb.DeleteContextRequest, _context: object) -> pb.DeleteContextResponse:
        freed_bytes = await self._lmcache.delete_context(
            request.tenant, session_id=request.session_id, cache_refs=tuple(request.cache_refs)
        )
        return pb.DeleteContextResponse(freed_bytes=freed_bytes)

    async def _touch(self, request: pb.TouchContextRequest, _context: object) -> pb.TouchContextResponse:
        touched = await self._lmcache.touch_context(request.tenant, request.session_id, request.expires_at_ms)
        return pb.TouchContextResponse(num_manifests=touched)

    async def _wait_sealed(self, request: pb.WaitSealedRequest, _context: object) -> pb.WaitSealedResponse:
        outcome = await self._lmcache.wait_sealed(request.tenant, request.cache_ref, timeout_ms=0)
        return pb.WaitSealedResponse(sealed=outcome.is_sealed, reason=outcome.reason)

    async def _no_manifest(self, _request: pb.GetManifestRequest, _context: object) -> pb.GetManifestResponse:
        raise CacheRefNotFound("LMCache stores this pod's KV, which has no manifests")

    async def _no_fork(self, _request: pb.ForkContextRequest, _context: object) -> pb.ForkContextResponse:
        return pb.ForkContextResponse(forked=False)

    async def _no_pull(self, _request: pb.PullContextRequest, _context: object) -> pb.PullContextResponse:
        # Servers of LMCache that share an L2 need none.
        return pb.PullContextResponse(outcome=pb.PULL_OUTCOME_REFUSED)

    async def _nothing_kept(self, _request: pb.ListKeptRequest, _context: object) -> pb.ListKeptResponse:
        return pb.ListKeptResponse()

    async def _no_stats(self, _request: pb.StatsRequest, _context: object) -> pb.StatsResponse:
        return pb.StatsResponse()
