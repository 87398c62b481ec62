"""Answers that may be asked for again: recorded while they are given, packed for the commit, given again.

The packed answer equals the client's, to the byte. Only the store knows the expiry after the commit. A random number
stands in its place, and is replaced each time the answer is given.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib

import msgspec

from contextcache.errors import AnswerNotKept, ContextCacheError, IdempotencyKeyReused
from contextcache.model import KeptAnswer, Repeatable
from contextcache.terms import REPLAYED_HEADER
from vllm_plugin.turn.engine import Send, send_whole

RAW_BYTES_MAX = 4 << 20
"""Limit of an answer as it is sent: a stream of some fifteen thousand tokens."""
PACKED_BYTES_MAX = 256 << 10
"""As it is kept: the manager takes no more."""
_LARGE_BYTES = 256 << 10
"""Size from which packing takes milliseconds, in a thread."""

_PACKED = msgspec.msgpack.Decoder(tuple[str, list[tuple[str, str]], bytes])
Headers = list[tuple[str, str]]


class Recording:
    """One answer while it is given."""

    def __init__(self) -> None:
        self.expires_at_s = 10**17 + secrets.randbelow(9 * 10**17)
        """Stands for the end of the context's life, which the commit sets."""
        self.content_type = "application/json"
        self.head: Headers | None = None
        """Headers of a stream, which is sent them before its turn is committed."""
        self._body = bytearray()

    def add(self, piece: bytes) -> None:
        """Note a piece of a stream. An answer over the limit is not kept."""
        if len(self._body) <= RAW_BYTES_MAX:
            self._body += piece

    async def packed(self, headers: Headers, end: bytes) -> bytes:
        """Return the packed answer; empty: it is too large. `headers`: those of an answer without a stream."""
        head = [("content-type", self.content_type), *(self.head or headers)]
        if len(self._body) + len(end) > RAW_BYTES_MAX:
            return b""
        raw = msgspec.msgpack.encode((str(self.expires_at_s), head, bytes(self._body) + end))
        if len(raw) < _LARGE_BYTES:
            small = zlib.compress(raw, 1)
        else:
            small = await asyncio.to_thread(zlib.compress, raw, 1)
        return small if len(small) <= PACKED_BYTES_MAX else b""


async def give_again(kept: KeptAnswer, said: Repeatable, send: Send) -> None:
    """Send an answer as it was sent before.

    Raises IdempotencyKeyReused for another request, AnswerNotKept, ContextCacheError for one that is damaged.
    """
    if kept.request != said.request:
        raise IdempotencyKeyReused("this idempotency key was used for a different request", param="Idempotency-Key")
    if not kept.answer:
        told = f"the request was already answered, and committed as generation {kept.generation}"
        raise AnswerNotKept(f"{told}; its answer was too large to store", param="Idempotency-Key")
    try:
        # A little more than there can be: names and headers.
        raw = zlib.decompressobj().decompress(kept.answer, RAW_BYTES_MAX + (1 << 16))
        placeholder, head, body = _PACKED.decode(raw)
    except (zlib.error, msgspec.DecodeError) as exc:
        raise ContextCacheError("the stored answer is damaged") from exc
    expires_at_s = str(kept.expires_at_ms // 1000)
    whole = body.replace(placeholder.encode(), expires_at_s.encode())
    headers = [(name, text.replace(placeholder, expires_at_s)) for name, text in head]
    await send_whole(send, 200, [*headers, (REPLAYED_HEADER, "true")], whole)
