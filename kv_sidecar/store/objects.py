"""The store that all pods of a release share, as objects by name: S3, GCS, Azure, or a mounted directory.

A thin layer over obstore 0.12, whose own chain finds the credentials (AWS_…, GOOGLE_…, AZURE_…, the pod's identity) and
whose retries are bounded by the deadline here. The text of a store's error is neither logged nor returned: it may
name keys. Names are relative to the URL's path; stored_kv.py gives them a meaning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, GenericError
from obstore.store import LocalStore, from_url

from contextcache.errors import CorruptBlock, SidecarUnavailable
from kv_sidecar.tiers.data_directory import is_no_file
from kv_sidecar.tiers.store import Buffer

_ABSENT = (FileNotFoundError,)
"""Errors of obstore for an absent object."""
Item = TypeVar("Item")
_CALLS_AT_ONCE = 16
"""Parallel calls without a body, of one step: a directory bucket answers thousands a second."""
_PAGE = 1000
_LOOKS_AT_ONCE = 4
_PUTS = 10
"""Attempts of a put in a directory: a delete may remove the folder that was just made for it. obstore 0.12 has no error
of its own for that."""
TIMEOUT_S = 10.0
"""Longest time of one call, retries included: a block of 256 MiB at 0.2 Gbit/s."""
SCHEMES = ("s3", "gs", "az", "file")


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object, as a listing has it."""

    name: str
    size_bytes: int
    modified_at_ms: int
    """Unix time, by the store's clock."""


class ObjectStore:
    """Objects under one URL. A call that fails or passes its deadline raises SidecarUnavailable.

    Puts are atomic: a reader sees a whole object or none.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: longest time of one call, its retries included. Raises ValueError if it cannot be opened."""
        check_store_url(url)
        parts = urlsplit(url)
        self._timeout_s = timeout_s
        self._directory: Path | None = None
        """The mounted directory; None: a store of its own."""
        if parts.scheme == "file":
            self._directory = Path(unquote(parts.path))
            # Threads of this store: a mount that hangs must hold up nothing else.
            self._looks = ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="store-looks")
        try:
            # A delete removes a directory that it leaves empty; a put makes it again.
            self._store: Any = (
                LocalStore(self._directory, mkdir=True, automatic_cleanup=True)
                if self._directory is not None
                else from_url(url, retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=timeout_s)})
            )
        except (BaseError, OSError) as exc:
            reason = type(exc).__name__ if self._directory is None else f"{self._directory} is no usable directory"
            raise ValueError(f"SIDECAR_STORE_URL: the store cannot be opened: {reason}") from None

    async def put(self, name: str, data: Buffer) -> None:
        """Write an object, replacing one of the same name."""
        async with self._call():
            for tries_left in reversed(range(_PUTS if isinstance(self._store, LocalStore) else 1)):
                try:
                    # In one piece: parts of an upload that breaks off would stay in the store, unseen and paid for.
                    await obstore.put_async(self._store, name, data, use_multipart=False)
                    return
                except GenericError:
                    if not tries_left:
                        raise

    async def get(self, name: str, *, limit_bytes: int) -> Buffer | None:
        """Return an object's bytes, or None.

        Raises CorruptBlock for an object above `limit_bytes`, or another kind of file in its place.
        """
        async with self._call():
            if await self._is_no_file(name):
                raise CorruptBlock("the object's path is not a regular file")
            try:
                found = await obstore.get_async(self._store, name)
                if found.meta["size"] > limit_bytes:
                    raise CorruptBlock(f"the object has more than {limit_bytes} bytes")
                return memoryview(await found.bytes_async())
            except _ABSENT:
                return None

    async def head(self, name: str) -> ListedObject | None:
        """Return an object's size and age, or None."""
        async with self._call():
            if await self._is_no_file(name):
                return None
            try:
                return _told(await obstore.head_async(self._store, name))
            except _ABSENT:
                return None

    async def delete(self, name: str) -> None:
        """Remove an object. Idempotent."""
        async with self._call():
            try:
                await obstore.delete_async(self._store, name)
            except _ABSENT:
                return

    async def listed(self, prefix: str) -> AsyncGenerator[ListedObject, None]:
        """Yield the objects whose names begin with `prefix`, which ends with a slash. Each page has the deadline."""
        pages = obstore.list(self._store, prefix, chunk_size=_PAGE)
        while True:
            async with self._call():
                page: Sequence[Any] | None = await anext(pages, None)
            if page is None:
                return
            for found in page:
                yield _told(found)

    async def directories(self) -> list[str]:
        """Return the first parts of all names."""
        async with self._call():
            found = await obstore.list_with_delimiter_async(self._store)
        return [prefix.strip("/") for prefix in found["common_prefixes"]]

    async def _is_no_file(self, name: str) -> bool:
        """Return whether another kind of file is in an object's place: obstore 0.12 opens a FIFO and never returns."""
        if self._directory is None:
            return False
        return await asyncio.get_running_loop().run_in_executor(self._looks, is_no_file, self._directory / name)

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (BaseError, OSError, TimeoutError) as exc:
            raise SidecarUnavailable(f"no answer from the shared store: {type(exc).__name__}") from None


async def each(
    items: Iterable[Item], call: Callable[[Item], Awaitable[None]], *, at_once: int = _CALLS_AT_ONCE
) -> None:
    """Make a call for each item, `at_once` in parallel. After a failure no further call begins; then raise it."""
    slots, has_failed = asyncio.Semaphore(at_once), False

    async def one(item: Item) -> None:
        nonlocal has_failed
        async with slots:
            if has_failed:
                return
            try:
                await call(item)
            except BaseException:
                has_failed = True
                raise

    ends = await asyncio.gather(*map(one, items), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end


def check_store_url(url: str) -> None:
    """Raise ValueError unless a URL names a store, or is empty."""
    parts = urlsplit(url)
    named = parts.path.startswith("/") and not parts.netloc if parts.scheme == "file" else bool(parts.netloc)
    if url and not (parts.scheme in SCHEMES and named):
        raise ValueError(
            f"SIDECAR_STORE_URL must begin with {', '.join(f'{scheme}://' for scheme in SCHEMES)} and name a "
            "bucket or directory"
        )


def _told(found: Any) -> ListedObject:
    return ListedObject(found["path"], found["size"], round(found["last_modified"].timestamp() * 1000))
