"""Block files that come in pieces, put together one at a time within a size and a number of streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

from contextcache.errors import InvalidRequest
from contextcache.model import CacheRef

STREAMS_MAX = 4
"""Block files assembled from frames at once; further streams wait. Each holds up to 256 MiB."""
Place: TypeAlias = tuple[CacheRef, int, int]
"""cache_ref, rank, block index."""


class FrameAssembly:
    """The frames of one stream. Holds a slot while a file is on its way, so that memory is bounded over all streams."""

    def __init__(self, slots: asyncio.Semaphore, *, limit_bytes: int) -> None:
        self._slots = slots
        self._limit_bytes = limit_bytes
        self._place: Place | None = None
        self._data = bytearray()

    async def __aenter__(self) -> FrameAssembly:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    async def add(self, place: Place, frame: bytes, *, last: bool) -> bytearray | None:
        """Append a frame; return the whole file after its last one, to be used before `release()`.

        Raises InvalidRequest when the file is too large or another's frame comes in between.
        """
        if self._place is None:
            await self._slots.acquire()
            self._place = place
        if place != self._place:
            raise InvalidRequest("a block file began before the previous one ended")
        if len(self._data) + len(frame) > self._limit_bytes:
            raise InvalidRequest(f"the block file has more than {self._limit_bytes} bytes")
        self._data += frame
        return self._data if last else None

    def hand_over(self) -> Callable[[], None]:
        """Forget the file, whose slot is the caller's from now on; return the function that frees the slot."""
        assert self._place is not None, "there is no file"
        self._place = None
        self._data = bytearray()
        return self._slots.release

    def release(self) -> None:
        """Forget the file and let another stream go on. Harmless when there is none."""
        if self._place is not None:
            self._place = None
            self._data = bytearray()
            self._slots.release()

    def check_finished(self) -> None:
        """Raise InvalidRequest when the stream ended inside a file."""
        if self._place is not None:
            raise InvalidRequest("the stream ended before the last frame")
