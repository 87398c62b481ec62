"""Server-sent events: bytes cut anywhere to whole events, and back. Pure.

An event ends with an empty line; lines end with LF or CRLF. Events without a `data` field (comments, keep-alives)
pass byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from contextcache.errors import EngineFailed

EVENT_BYTES_MAX = 16 << 20
"""A longer event is no token; a stream without an empty line must not fill the memory."""
_EVENT_END = re.compile(rb"\n\r?\n")
_END_BYTES_MAX = 3
_FIELD = b"data:"
_ONE_EVENT = re.compile(rb"data: (.*[^\r\n])\n\n")
"""A chunk as vLLM sends it for a token."""
UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers of a stream by which caches do not store it, and nginx passes each event on as it comes."""


class Event(NamedTuple):
    """One event as it came."""

    raw: bytes
    """All bytes, the empty line at the end included."""
    data: bytes | None
    """Its `data` fields, joined by line feeds; None: it has none."""
    others: tuple[bytes, ...] = ()
    """Its other lines."""

    def with_data(self, data: bytes) -> bytes:
        """Return the event's bytes with other data; `data` has no line feed."""
        head = b"".join([line + b"\n" for line in self.others]) if self.others else b""
        return b"%b%b %b\n\n" % (head, _FIELD, data)


def begins_stream(head: Mapping[str, Any]) -> bool:
    """Return whether an ASGI head of an answer announces server-sent events."""
    kinds = [value for name, value in head.get("headers", ()) if name.lower() == b"content-type"]
    return any(kind.startswith(b"text/event-stream") for kind in kinds)


class EventSplitter:
    """Collects bytes until events are whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        """Bytes at the front that no event's end begins in."""

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Take bytes, give the events they complete. Raises EngineFailed for an event without an end."""
        if not self._buffer and (whole := _ONE_EVENT.fullmatch(chunk)):
            yield Event(chunk, whole[1])
            return
        self._buffer += chunk
        while found := _EVENT_END.search(self._buffer, self._searched):
            raw = bytes(self._buffer[: found.end()])
            body = raw[: found.start()].removesuffix(b"\r")
            del self._buffer[: len(raw)], found
            self._searched = 0
            yield _event(raw, body)
        self._searched = max(0, len(self._buffer) - _END_BYTES_MAX)
        if len(self._buffer) > EVENT_BYTES_MAX:
            raise EngineFailed("the engine sent an event without an end")

    def rest(self) -> bytes:
        """Return the bytes of an event without its end; there are none of a whole stream."""
        return bytes(self._buffer)


def _event(raw: bytes, body: bytes) -> Event:
    fields: list[bytes] = []
    others: list[bytes] = []
    for line in body.split(b"\n"):
        text = line.removesuffix(b"\r")
        if text.startswith(_FIELD):
            fields.append(text[len(_FIELD) :].removeprefix(b" "))
        else:
            others.append(text)
    return Event(raw, b"\n".join(fields), tuple(others)) if fields else Event(raw, None)
