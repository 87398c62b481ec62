"""Python client of the public HTTP API (docs/reference/python.md), synchronous and asynchronous. It needs only httpx.

`calls` has the request and the parser of each call, `retries` the rule for retries. `_async` has the objects and their
transport. A build generates `_sync` and `errors`.
"""

from contextcache.client._async.contexts import AsyncContext, AsyncContextCache, AsyncReplyStream
from contextcache.client._sync.contexts import Context, ContextCache, ReplyStream
from contextcache.client.events import Event, Finished, TextDelta, ToolCallDelta
from contextcache.client.failures import (
    ApiError,
    BrokenStream,
    ClientError,
    ConnectionFailed,
    NotCreated,
    NotUnderstood,
)
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
