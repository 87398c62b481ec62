"""How long and how large a request's head may be: uvicorn bounds neither, and nobody needs a key to send one.

Rules: a connection that is not in the middle of a request has HEAD_TIMEOUT_S to show the whole head of the next one
(one that says nothing at all after an answer is closed by uvicorn, sooner). What is left of a refused request's body
counts as waiting for the next head: it is not read for ever. Head and trailers are no larger than HEAD_SIZE_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
from typing import Any

HEAD_TIMEOUT_S = 30.0
"""A head is a packet or a few; the slowest client that means well needs some seconds."""
HEAD_SIZE_BYTES_MAX = 64 << 10
"""Envoy's own bound is 60 KiB."""
_HEADER_OVERHEAD_BYTES = 32
"""What a header costs besides its letters, as HTTP/2 counts it."""


def bounded_heads(protocol: Any, *, timeout_s: float = HEAD_TIMEOUT_S) -> Any:
    """Return `protocol`, whichever of uvicorn's two it is, with both bounds; h11 brings a size of its own."""
    return _timed(_sized(protocol) if hasattr(protocol, "on_header") else protocol, timeout_s)


def _timed(protocol: Any, timeout_s: float) -> Any:
    class TimedHeads(protocol):  # type: ignore[misc]  # a class known at run time
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            self._wait_for_head()
            super().data_received(data)
            if not self._is_between_requests():
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _is_between_requests(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _wait_for_head(self) -> None:
            if self._deadline is None and self._is_between_requests():
                # The last moment is kept while bytes come: a byte now and then is no head.
                self._deadline = self.loop.call_later(timeout_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return TimedHeads


def _sized(protocol: Any) -> Any:
    class SizedHeads(protocol):  # type: ignore[misc]  # a class known at run time
        _head_bytes = 0
        """Of this request: what the parser has told of."""
        _untold_bytes = 0
        """What the parser keeps, and tells when the line has ended."""

        def data_received(self, data: bytes) -> None:
            self._untold_bytes += len(data)
            super().data_received(data)
            if self._untold_bytes > HEAD_SIZE_BYTES_MAX and not self.transport.is_closing():
                self.send_400_response("The request's head is too large.")

        def on_message_begin(self) -> None:
            self._head_bytes = 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + _HEADER_OVERHEAD_BYTES)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._untold_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._untold_bytes = 0
            super().on_body(body)

        def _count(self, size_bytes: int) -> None:
            self._untold_bytes = 0
            self._head_bytes += size_bytes
            if self._head_bytes > HEAD_SIZE_BYTES_MAX:
                raise ValueError("the request's head is too large")

    return SizedHeads
