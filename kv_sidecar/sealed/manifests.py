"""The sealed manifests: their files and the index over them, changed together under one lock.

One small file each under `manifests/`, small enough that a read is a few microseconds. The index keeps token ids of
tails only: a manifest's file is read, and verified, each time it is opened. A record refers to its blocks. The catalog
decides which blocks may be freed once a manifest is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import zip_longest
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from contextcache.errors import CorruptBlock, SidecarUnavailable
from contextcache.model import NO_PROMISE, CacheRef, Manifest, Promise, SessionId, TenantId
from contextcache.names import CACHE_REF_PATTERN, KEPT_PREFIX
from kv_sidecar.blocks import Blocks, Holder
from kv_sidecar.format.ids import TOKEN_BYTES, BlockKey, fan_out
from kv_sidecar.format.manifest import all_keys, decode_manifest, encode_manifest
from kv_sidecar.format.safetensors_header import HEAD_BYTES, tensor_start
from kv_sidecar.refs import Refs
from kv_sidecar.runtime import Runtime
from kv_sidecar.sealed.prefixes import (
    Beginning,
    Found,
    PrefixIndex,
    PrefixQuestion,
    Prompt,
    beginning_of,
    common,
    prompt_of,
)
from kv_sidecar.tiers.data_directory import DataDirectory, read_with

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_REMEMBERED = 4
"""Manifests in memory, about 5 MB each for 128 000 tokens."""
SWEPT_AT_ONCE = 100
"""Manifests removed while seals, touches and deletes wait, and promises ended while all else waits."""
MAX_FILE_BYTES = 256 << 20
"""Largest manifest file: it has 4 bytes a token and about 35 a block file, so ten million tokens are far below."""
_SUFFIX = ".safetensors"
MATCHES_MAX = 3
"""Matches in one answer: the caller opens one manifest after the other until one serves."""
PASSED_OVER_MAX = 8
"""Manifests that one look-up finds unreadable before it answers with nothing."""
STAYS_MS = 60_000
"""Time from match to load, in which a request may wait in the engine's queue."""


@dataclass(frozen=True, slots=True)
class ManifestRecord:
    """One sealed manifest."""

    cache_ref: CacheRef
    tenant: TenantId
    session_id: SessionId
    keys: tuple[BlockKey, ...]
    """All its block files, all ranks."""
    num_tokens: int
    expires_at_ms: int
    size_bytes: int
    at: Beginning
    """Its place among the others."""
    interrupted: bool = False
    """Whether its turn ended without a commit."""
    promise: Promise = NO_PROMISE

    @property
    def is_expendable(self) -> bool:
        """Whether no context needs it: it is evicted before any, and no session names it."""
        return self.is_kept or self.interrupted

    @property
    def is_kept(self) -> bool:
        """Whether it is of plain requests: no session names it."""
        return self.session_id.startswith(KEPT_PREFIX)

    @property
    def holders(self) -> list[Holder]:
        """Kinds of its references to blocks."""
        promises: list[Holder] = ["promise"] if self.promise.until_ms else []
        pins: list[Holder] = ["pin"] if self.promise.pinned else []
        return ["kept" if self.is_expendable else "manifest", *promises, *pins]


def record_of(manifest: Manifest) -> ManifestRecord:
    """Return the record of a manifest."""
    return ManifestRecord(
        cache_ref=manifest.cache_ref,
        tenant=manifest.tenant,
        session_id=manifest.session_id,
        keys=all_keys(manifest),
        num_tokens=len(manifest.token_ids),
        expires_at_ms=manifest.expires_at_ms,
        size_bytes=manifest.size_bytes,
        at=beginning_of(manifest),
        interrupted=manifest.interrupted,
        promise=manifest.promise,
    )


Change: TypeAlias = Literal["sealed", "touched", "replaced"]
"""`touched`: only the expiry is new. `replaced`: kept KV that longer KV of its group replaced; it is gone here."""
Lose: TypeAlias = Callable[[ManifestRecord], Awaitable[None]]
"""Forgets a context with a damaged or missing manifest."""


class Manifests:
    """A record is here only while its file is on disk; the file goes first. Used from one event loop.

    Writes are atomic, and removals are durable when they return.
    """

    def __init__(self, directory: DataDirectory, runtime: Runtime, blocks: Blocks, refs: Refs) -> None:
        self._directory = directory
        self._root = directory.root / "manifests"
        self._clock = runtime.clock
        self._threads = runtime.threads
        self._metrics = runtime.metrics
        self._blocks = blocks
        self._refs = refs
        self._records: dict[CacheRef, ManifestRecord] = {}
        """The record used longest ago first."""
        self._sessions: dict[tuple[TenantId, SessionId], dict[CacheRef, None]] = {}
        self._promise_ends: list[tuple[int, CacheRef]] = []
        """Heap of the ends of promises, Unix time in ms; also of promises that are gone."""
        self.prefixes = PrefixIndex()
        self._read_last: dict[CacheRef, tuple[ManifestRecord, Manifest]] = {}
        """Manifests read or written last, oldest first, each with the record of that time."""
        self.on_change: Callable[[Change, ManifestRecord], None] = lambda _change, _record: None
        """Called with each manifest that the shared store has to learn of."""
        self.on_found: Callable[[Manifest], None] = lambda _manifest: None
        """Called with each manifest before its record is added: records have no tokens."""
        self.lock = asyncio.Lock()
        """Held while manifest files change, so that a late seal or touch never undoes a delete. Waits for the local
        disk only, never for the network."""

    # The index.

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[ManifestRecord]:
        """Iterate over a snapshot of all records, expired ones too, the one used longest ago first."""
        return iter(list(self._records.values()))

    def get(self, cache_ref: CacheRef) -> ManifestRecord | None:
        """Return a record, expired or not."""
        return self._records.get(cache_ref)

    def live(self, tenant: TenantId, cache_ref: CacheRef) -> ManifestRecord | None:
        """Return an unexpired record of this tenant."""
        record, now_ms = self._records.get(cache_ref), self._clock.now_ms()
        usable = record is not None and record.tenant == tenant and record.expires_at_ms > now_ms
        return record if usable else None

    def use(self, cache_ref: CacheRef) -> None:
        """Make a record the one that was used last. Harmless when there is none."""
        record = self._records.pop(cache_ref, None)
        if record is not None:
            self._records[cache_ref] = record
            refs = self._sessions[record.tenant, record.session_id]
            del refs[cache_ref]
            refs[cache_ref] = None

    def of_session(self, tenant: TenantId, session_id: SessionId) -> list[ManifestRecord]:
        """Return a session's records, or a group's, the one used longest ago first."""
        return [self._records[ref] for ref in self._sessions.get((tenant, session_id), ())]

    def groups(self, tenant: TenantId) -> list[SessionId]:
        """Return a tenant's groups of kept KV, for a list; looks at all sessions."""
        return [name for owner, name in self._sessions if owner == tenant and name.startswith(KEPT_PREFIX)]

    def holders(self, key: BlockKey) -> list[ManifestRecord]:
        """Return the records that hold a block; looks at all of them, for the rare corrupt block."""
        return [record for record in self._records.values() if key in record.keys]

    def _add(self, record: ManifestRecord) -> None:
        """Add a record, replacing one of the same name."""
        self._hold(record)
        if record.cache_ref in self._records:
            self._drop(record.cache_ref)
        self._records[record.cache_ref] = record
        self._sessions.setdefault((record.tenant, record.session_id), {})[record.cache_ref] = None
        self.prefixes.add(record.cache_ref, record.at)
        self._refs.sealed(record.tenant, record.cache_ref)

    def _drop(self, cache_ref: CacheRef) -> None:
        record = self._records.pop(cache_ref)  # its promise may have ended while its file was removed
        session = (record.tenant, record.session_id)
        del self._sessions[session][cache_ref]
        if not self._sessions[session]:
            del self._sessions[session]
        self.prefixes.remove(cache_ref, record.at)
        self._let_go(record)

    def _hold(self, record: ManifestRecord) -> None:
        for holder in record.holders:
            self._blocks.hold(record.keys, holder)
        if record.promise.until_ms:
            if len(self._promise_ends) > 2 * len(self._records):
                records = self._records.values()
                self._promise_ends = [(it.promise.until_ms, it.cache_ref) for it in records if it.promise.until_ms]
                heapify(self._promise_ends)
            heappush(self._promise_ends, (record.promise.until_ms, record.cache_ref))

    def _let_go(self, record: ManifestRecord) -> None:
        for holder in reversed(record.holders):
            self._blocks.let_go(record.keys, holder)

    def _replace(self, after: ManifestRecord) -> None:
        """Put a changed record in the place of the same manifest's, whose promise may have ended in the meantime."""
        self._hold(after)
        self._let_go(self._records[after.cache_ref])
        self._records[after.cache_ref] = after

    def end_promise(self, record: ManifestRecord) -> None:
        """Take the promise from a record. Its file still has it, so after a restart it lasts to its time."""
        self._replace(replace(record, promise=NO_PROMISE))

    def end_promises(self) -> bool:
        """Take the promises from the records whose time is over, `SWEPT_AT_ONCE` at most; return whether all are."""
        now_ms = self._clock.now_ms()
        for _ in range(SWEPT_AT_ONCE):
            if not self._promise_ends or self._promise_ends[0][0] > now_ms:
                return True
            until_ms, cache_ref = heappop(self._promise_ends)
            record = self._records.get(cache_ref)
            if record is not None and record.promise.until_ms == until_ms:
                self.end_promise(record)
        return False

    def _forget(self, records: Iterable[ManifestRecord]) -> None:
        for record in records:
            self._drop(record.cache_ref)
            self._refs.unsealed(record.tenant, record.cache_ref)
            self._read_last.pop(record.cache_ref, None)

    # Reading.

    async def rebuild(self) -> None:
        """Read all files, one after the other; remove manifests that lack a block or have expired.

        Notes the tenant and the checksums of the others' blocks. Raises SidecarUnavailable for a fault that passes.
        """
        usable, doomed = await self._threads.run(self._read_all)
        # An expiry that slides is the latest for the context that was used last.
        for record in sorted(usable, key=lambda record: record.expires_at_ms):
            self._add(record)
        await self._threads.write(self._delete, doomed)
        fields = {"num_found": len(usable) + len(doomed), "num_usable": len(usable)}
        log.info("manifest index rebuilt", extra=fields)

    def _read_all(self) -> tuple[list[ManifestRecord], list[ManifestRecord]]:
        """Return usable and unusable manifests, as records: the tokens of all may exceed the memory."""
        usable: list[ManifestRecord] = []
        doomed: list[ManifestRecord] = []
        known: dict[BlockKey, BlockKey] = {}
        now_ms = self._clock.now_ms()
        files, _ = self._directory.fan_out_files(self._root.name, is_ours=_is_ours)
        for path in sorted(files):
            manifest = self._read(path.rpartition("/")[2].removesuffix(_SUFFIX))
            if manifest is None:
                continue
            record = record_of(manifest)
            if record.expires_at_ms <= now_ms or not self.is_whole(record):
                doomed.append(record)
                continue
            for key, checksum in zip_longest(record.keys, manifest.block_checksums):
                self._blocks.vouch(key, manifest.tenant, checksum)
            self.on_found(manifest)
            # Forks share their blocks, and so the names of them.
            usable.append(replace(record, keys=tuple(known.setdefault(key, key) for key in record.keys)))
        return usable, doomed

    def is_whole(self, record: ManifestRecord) -> bool:
        """Return whether all blocks of a manifest are stored."""
        return all(self._blocks.get(key).is_stored for key in record.keys)

    async def read(self, record: ManifestRecord, *, again: bool = False) -> Manifest | None:
        """Return the manifest of a record; None when its file is gone, or bad and therefore put aside.

        `again`: a manifest read or written a moment ago serves too, as between a question and its load.
        """
        before = self._read_last.pop(record.cache_ref, None)
        if again and before is not None and before[0] is record:
            manifest: Manifest | None = before[1]
        else:
            manifest = await self._threads.run(self._read, record.cache_ref, record.tenant)
        if manifest is not None:
            self._remember(record, manifest)
        return manifest

    def _remember(self, record: ManifestRecord, manifest: Manifest) -> None:
        self._read_last[record.cache_ref] = (record, manifest)
        if len(self._read_last) > _REMEMBERED:
            del self._read_last[next(iter(self._read_last))]

    async def in_common(self, record: ManifestRecord, prompt: Prompt, first: int, count: int) -> int | None:
        """Return how many of `count` tokens from `first` on a manifest shares with a prompt; None as `read`.

        Verifies the file's length only.
        """
        count = min(count, record.num_tokens - first)

        def tokens(descriptor: int, size_bytes: int) -> bytes:
            start = tensor_start(os.pread(descriptor, HEAD_BYTES, 0))
            if start + record.num_tokens * TOKEN_BYTES != size_bytes:
                raise CorruptBlock("the manifest's size differs from its header")
            return os.pread(descriptor, count * TOKEN_BYTES, start + first * TOKEN_BYTES)

        theirs = await self._threads.run(self._from_file, record.cache_ref, tokens)
        if theirs is None:
            return None
        return common(theirs, prompt.token_ids[first * TOKEN_BYTES : (first + count) * TOKEN_BYTES]) // TOKEN_BYTES

    def _read(self, cache_ref: CacheRef, tenant: TenantId | None = None) -> Manifest | None:
        """Return the manifest in a file, which must be this tenant's; None: there is none that can be used."""

        def decoded(descriptor: int, size_bytes: int) -> Manifest:
            if size_bytes > MAX_FILE_BYTES:
                raise CorruptBlock("the file is larger than a manifest")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                manifest = decode_manifest(file.read(size_bytes))
            if manifest.cache_ref != cache_ref or tenant not in {None, manifest.tenant}:
                raise CorruptBlock("the manifest belongs to a different context")
            return manifest

        return self._from_file(cache_ref, decoded)

    def _from_file(self, cache_ref: CacheRef, parse: Callable[[int, int], Answer]) -> Answer | None:
        """Return a file's content; None: there is no file, or a bad one, which moves into quarantine if it can.

        Raises SidecarUnavailable for a fault that passes.
        """
        path = self._path(cache_ref)
        try:
            return read_with(path, parse)
        except FileNotFoundError:
            return None
        except CorruptBlock:
            log.warning("manifest in quarantine", extra={"cache_ref": cache_ref})
            try:
                self._directory.put_aside(path)
            except OSError:
                log.warning("manifest quarantine failed", extra={"cache_ref": cache_ref}, exc_info=True)
            return None

    # Search.

    async def match(self, question: PrefixQuestion, lose: Lose) -> Sequence[Found]:
        """Return the KV that begins most like the prompt, the longest first. Raises InvalidRequest.

        A match stays for a while, so that its load finds it: neither the watermark nor a longer context of the
        conversation removes it. A delete or its expiry does, and the load is then a miss.
        """
        question.check()
        sizes = self.prefixes.sizes(question.tenant, question.fingerprint)
        best: Sequence[Found] = ()
        if sizes and question.num_tokens >= question.tokens_min:
            prompt = await self._threads.run(
                lambda: prompt_of(question.tenant, question.fingerprint, question.token_ids, sizes=sizes)
            )
            best = await self._readable(question, prompt, lose)
        for one in best:
            self._refs.name(question.tenant, one.cache_ref, for_ms=STAYS_MS)
        self._metrics.prefix_matches.labels("some" if best else "none").inc()
        return best

    async def _readable(self, question: PrefixQuestion, prompt: Prompt, lose: Lose) -> Sequence[Found]:
        """Return the longest matches of the prompt.

        A manifest that cannot be read hides others of the same blocks, so the search begins again without it.
        """
        passed_over: set[CacheRef] = set()
        while len(passed_over) < PASSED_OVER_MAX:
            try:
                return await self._nearest(question, prompt, passed_over)
            except _Unreadable as exc:
                passed_over.add(exc.record.cache_ref)
                if exc.is_bad:
                    await lose(exc.record)
        return ()

    async def _nearest(self, question: PrefixQuestion, prompt: Prompt, passed_over: set[CacheRef]) -> Sequence[Found]:
        """Return the longest matches in the index, and shorter ones as substitutes, the longest whole one among them.

        The first manifest is read and verified: the engine loads it next. Raises _Unreadable.
        """

        def live(cache_ref: CacheRef) -> ManifestRecord | None:
            return None if cache_ref in passed_over else self.live(question.tenant, cache_ref)

        found: list[Found] = []
        for one in self.prefixes.find(prompt, lambda cache_ref: live(cache_ref) is not None):
            record, num_tokens = live(one.cache_ref), one.num_tokens
            if record is not None and one.goes_on:  # it may share some of the block in which the two part
                shared = self.in_common(record, prompt, num_tokens, record.at.block_tokens)
                num_tokens += await _verified(record, shared)
            if record is not None and num_tokens >= question.tokens_min:
                found.append(replace(one, num_tokens=num_tokens))
        found.sort(key=lambda one: one.num_tokens, reverse=True)
        if found and (record := live(found[0].cache_ref)) is not None:
            await _verified(record, self.read(record, again=True))
        rest = sorted(found[MATCHES_MAX - 1 :], key=lambda one: not one.is_whole)
        return [*found[: MATCHES_MAX - 1], *rest[:1]]

    def written_at_ms(self, cache_ref: CacheRef) -> int | None:
        """Return when a manifest's file was written (Unix time in ms, at its seal or a later touch); None: no file."""
        try:
            return self._path(cache_ref).lstat().st_mtime_ns // 1_000_000
        except OSError:
            return None

    # Changes.

    async def publish(self, plan: Callable[[], Manifest | None]) -> ManifestRecord | None:
        """Write the manifest that `plan` returns once nothing else changes manifests; None: there is none to write.

        Raises the errors of `plan`, and StorageFull.
        """
        async with self.lock:
            manifest = plan()
            if manifest is None:
                return None
            await self._threads.write(self._put, manifest)
            record = record_of(manifest)
            self.on_found(manifest)
            self._add(record)
            self._remember(record, manifest)
            return record

    async def move_expiry(
        self, choose: Callable[[], Iterable[ManifestRecord]], expires_at_ms: int, *, interrupts: bool = False
    ) -> int:
        """Give the unexpired manifests among the chosen ones a new expiry, in file and index; return how many.

        Chooses once nothing else changes manifests. A manifest of an interrupted turn keeps its expiry, and promised
        kept KV lives at least to its promise's end.
        `interrupts`: the turns of the chosen ones have ended without a commit, and no expiry becomes later.
        """

        def moved(record: ManifestRecord) -> ManifestRecord:
            if not interrupts:
                least_ms = record.promise.until_ms if record.is_kept else 0
                return replace(record, expires_at_ms=max(expires_at_ms, least_ms))
            until_ms = min(expires_at_ms, record.expires_at_ms)
            return replace(record, expires_at_ms=until_ms, interrupted=True, promise=NO_PROMISE)

        return await self.change(choose, moved)

    async def change(
        self,
        choose: Callable[[], Iterable[ManifestRecord]],
        plan: Callable[[ManifestRecord], ManifestRecord | None],
    ) -> int:
        """Give the unexpired manifests among the chosen ones the expiry, mark and promise of `plan`; return how many.

        File and index change together. Chooses and plans once nothing else changes manifests. None: no change. A
        manifest of an interrupted turn stays as it is.
        """
        num_changed = 0
        async with self.lock:
            for record in choose():
                if record.interrupted or self.live(record.tenant, record.cache_ref) != record:
                    continue
                changed = plan(record)
                if changed is not None and await self._threads.write(self._rewrite, changed):
                    self._replace(changed)
                    self.on_change("touched", changed)
                    num_changed += 1
        return num_changed

    async def remove(
        self, tenant: TenantId, session_id: SessionId, cache_refs: Iterable[CacheRef]
    ) -> list[ManifestRecord]:
        """Remove the manifests of a session ("" for none) and of `cache_refs` for good; return them.

        Raises OSError when a file cannot be removed, and then nothing is forgotten.
        """
        async with self.lock:
            named = [self._records.get(cache_ref) for cache_ref in cache_refs]
            found = [record for record in named if record is not None and record.tenant == tenant]
            records = list(dict.fromkeys([*found, *self.of_session(tenant, session_id)]))
            for error in (await self._threads.write(self._delete, records)).values():
                raise error
            self._forget(records)
            return records

    async def lose(self, choose: Callable[[], Iterable[ManifestRecord]]) -> list[ManifestRecord]:
        """Remove and return the chosen manifests: they cannot be served. Chooses once nothing else changes manifests.

        A record is forgotten even if its file cannot be removed.
        """
        async with self.lock:
            records = [record for record in choose() if self.get(record.cache_ref) == record]
            await self._threads.write(self._delete, records)
            self._forget(records)
        for record in records:
            log.warning("context lost", extra={"cache_ref": record.cache_ref, "tenant": record.tenant})
        return records

    async def sweep(
        self, doomed: Iterable[ManifestRecord], may_go: Callable[[ManifestRecord], bool] = lambda _: True
    ) -> list[ManifestRecord]:
        """Remove and return those that have not changed, `SWEPT_AT_ONCE` at a time: no call waits for them.

        `may_go` is asked again once nothing else changes manifests. A record whose file cannot be removed stays, and
        is not returned.
        """
        # Files of one directory together: its sync then serves all of them.
        selected = sorted(doomed, key=lambda record: fan_out(record.cache_ref))
        swept: list[ManifestRecord] = []
        for first in range(0, len(selected), SWEPT_AT_ONCE):
            async with self.lock:
                part = selected[first : first + SWEPT_AT_ONCE]
                part = [record for record in part if self.get(record.cache_ref) is record and may_go(record)]
                failed = await self._threads.write(self._delete, part)
                records = [record for record in part if record.cache_ref not in failed]
                self._forget(records)
            swept += records
        return swept

    def _put(self, manifest: Manifest) -> None:
        self._directory.publish(encode_manifest(manifest), self._path(manifest.cache_ref))

    def _rewrite(self, record: ManifestRecord) -> bool:
        manifest = self._read(record.cache_ref, record.tenant)
        if manifest is not None:
            manifest = replace(manifest, interrupted=record.interrupted, promise=record.promise)
            self._put(replace(manifest, expires_at_ms=record.expires_at_ms))
        return manifest is not None

    def _delete(self, records: Sequence[ManifestRecord]) -> dict[CacheRef, OSError]:
        """Remove files for good, as many as possible; return the errors: one stuck file must not keep the others."""
        paths = {self._path(record.cache_ref): record.cache_ref for record in records}
        failed = self._directory.remove_for_good(path for path in paths if path.parent.is_dir())
        for path, error in failed.items():
            log.warning("manifest not removed", extra={"cache_ref": paths[path]}, exc_info=error)
        return {paths[path]: error for path, error in failed.items()}

    def _path(self, cache_ref: CacheRef) -> Path:
        return self._root / fan_out(cache_ref) / f"{cache_ref}{_SUFFIX}"


class _Unreadable(Exception):  # no error: the search goes on
    """A manifest cannot be read; `is_bad`: not later either."""

    def __init__(self, record: ManifestRecord, *, is_bad: bool) -> None:
        super().__init__(record.cache_ref)
        self.record, self.is_bad = record, is_bad


async def _verified(record: ManifestRecord, answer: Awaitable[Answer | None]) -> Answer:
    """Return a manifest's content. Raises _Unreadable."""
    try:
        read = await answer
    except SidecarUnavailable as exc:  # a fault that passes
        raise _Unreadable(record, is_bad=False) from exc
    if read is None:
        raise _Unreadable(record, is_bad=True)
    return read


def _is_ours(folder: str, name: str) -> bool:
    cache_ref = name.removesuffix(_SUFFIX)
    is_named_so = name.endswith(_SUFFIX) and CACHE_REF_PATTERN.fullmatch(cache_ref) is not None
    return is_named_so and fan_out(cache_ref) == folder
