"""A client of the public HTTP API (docs/reference/python.md), sync and async. Needs httpx and no other part of ours.

What a call sends and how its answer is read is in `calls`, once for both; `retries` says what is sent again. `_async`
has the objects that one holds and what carries their calls; `_sync` is made from it.
"""

from contextcache.client._async.contexts import AsyncContext, AsyncContextCache, AsyncReplyStream
from contextcache.client._sync.contexts import Context, ContextCache, ReplyStream
from contextcache.client.errors import (
    ApiError,
    BrokenStream,
    ClientError,
    ConnectionFailed,
    NotCreated,
    NotUnderstood,
)
from contextcache.client.events import Event, Finished, TextDelta, ToolCallDelta
from contextcache.client.types import ContextInfo, ContextUsage, Divergence, KeptInfo, Reply, TurnInfo, Usage

__all__ = [
    "ApiError",
    "AsyncContext",
    "AsyncContextCache",
    "AsyncReplyStream",
    "BrokenStream",
    "ClientError",
    "ConnectionFailed",
    "Context",
    "ContextCache",
    "ContextInfo",
    "ContextUsage",
    "Divergence",
    "Event",
    "Finished",
    "KeptInfo",
    "NotCreated",
    "NotUnderstood",
    "Reply",
    "ReplyStream",
    "TextDelta",
    "ToolCallDelta",
    "TurnInfo",
    "Usage",
]
