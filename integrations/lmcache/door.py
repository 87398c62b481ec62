"""The calls of a kv-sidecar that a gateway makes, answered by the turn's process where LMCache keeps the KV.

A gateway deletes, touches and looks at a context's KV at the pods that hold it, by the sidecar's gRPC service. LMCache
can delete and touch. The other answers say that there is no manifest, no fork, no pull and no kept KV. No engine of
ours calls here.
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
from contextcache.wire.servers import answering, bind, plain_server
from contextcache.wire.tls import WatchedTls
from integrations.lmcache.api import LMCacheApi
from integrations.lmcache.instead_of_sidecar import UNTOLD, LMCacheKV
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
        """Listen. Of several API servers of one pod the first one does; it deletes KV of the others too."""
        await super().start()
        if self._server is not None:
            return
        try:
            server = plain_server(max_concurrent_rpcs=_CALLS_MAX, tls=self._tls)
            server.add_generic_rpc_handlers((_calls(self),))
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


def _calls(lmcache: LMCacheKV) -> grpc.GenericRpcHandler:
    """Return the sidecar's calls that are answered here; all others are UNIMPLEMENTED."""

    async def delete(request: pb.DeleteContextRequest, _context: object) -> pb.DeleteContextResponse:
        freed_bytes = await lmcache.delete_context(
            request.tenant, session_id=request.session_id, cache_refs=tuple(request.cache_refs)
        )
        return pb.DeleteContextResponse(freed_bytes=freed_bytes)

    async def no_manifest(_request: pb.GetManifestRequest, _context: object) -> pb.GetManifestResponse:
        raise CacheRefNotFound("LMCache stores this pod's KV, which has no manifests")

    calls: dict[str, Behaviour | Message] = {
        "DeleteContext": delete,
        "TouchContext": answering(lmcache, "touch_context", pb, "TouchContext"),
        "WaitSealed": pb.WaitSealedResponse(sealed=False, reason=UNTOLD),
        "GetManifest": no_manifest,
        "ForkContext": pb.ForkContextResponse(forked=False),
        # Servers of LMCache that share an L2 need no pull.
        "PullContext": pb.PullContextResponse(outcome=pb.PULL_OUTCOME_REFUSED),
        "ListKept": pb.ListKeptResponse(),
        "Stats": pb.StatsResponse(),
    }
    return grpc.method_handlers_generic_handler(
        SERVICE_NAME, {name: _method(getattr(pb, f"{name}Request"), answer) for name, answer in calls.items()}
    )


def _method(request: type[Message], answer: Behaviour | Message) -> Any:
    """Return the method of a call; a message is its answer every time."""

    async def same(_request: Message, _context: object) -> Message:
        assert isinstance(answer, Message)
        return answer

    behaviour = same if isinstance(answer, Message) else answer
    return grpc.unary_unary_rpc_method_handler(behaviour, request.FromString, lambda told: told.SerializeToString())
