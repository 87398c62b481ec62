"""The line to the context manager: one question, which stored KV no session names. When to ask is orphans.py's."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from contextcache.convert import held_to_pb
from contextcache.errors import StoreUnavailable
from contextcache.model import HeldCacheRef
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.v1 import context_manager_pb2_grpc as pb_grpc
from contextcache.wire.channels import Connection
from contextcache.wire.rpc import error_from_rpc
from contextcache.wire.tls import WatchedTls


class ManagerQuestions:
    """Satisfies orphans.Manager, over one connection that is made at the first question."""

    def __init__(self, address: str, *, timeout_s: float, tls: WatchedTls | None = None) -> None:
        """`address`: host:port or unix:///path; `timeout_s`: deadline of every question."""
        self._connection = Connection(address, tls=tls)
        self._timeout_s = timeout_s

    async def orphans(self, held: Sequence[HeldCacheRef]) -> Sequence[int]:
        """See orphans.Manager. A manager of a release that does not know the question counts as silent."""
        stub: pb_grpc.ContextManagerServiceAsyncStub = pb_grpc.ContextManagerServiceStub(self._connection.channel())
        request = pb.CheckCacheRefsRequest(held=[held_to_pb(one) for one in held])
        try:
            answer = await stub.CheckCacheRefs(request, timeout=self._timeout_s)
        except grpc.RpcError as exc:
            raise error_from_rpc(exc, unavailable=StoreUnavailable) from exc
        return tuple(answer.orphans)

    async def close(self) -> None:
        """Close the connection; a question in flight fails."""
        await self._connection.close()
