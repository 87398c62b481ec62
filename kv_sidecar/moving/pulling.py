"""The story of a pull: a gateway asks for a context's KV from another sidecar while the turn that wants it travels.

1. `start` answers at once: nothing to do (`present`), no (`refused`, with the reason), or `started`.
2. In the background the sidecar takes the first wanted KV that the peer has and that this engine can use. It fetches
   the manifest, then the missing block files of every rank, and saves them like an engine's own.
3. Meanwhile questions for the manifest hear `cache_ref_pending`, or wait in resolve.py.
4. The caller of a pull names its peer, which `PeerRules` must allow: else a caller could send the sidecar anywhere.
5. A pull ends with a sealed manifest or with nothing. A failure ends the save with all its blocks, and the next
   question for the manifest is a miss. A deletion during the pull wins: the save is refused its blocks.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from itertools import takewhile
from typing import Literal, Protocol, TypeAlias

from contextcache.errors import (
    CacheRefNotFound,
    CacheRefPending,
    ContextCacheError,
    ContextDeleted,
    CorruptBlock,
    FingerprintMismatch,
    InvalidRequest,
    SidecarUnavailable,
)
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from contextcache.names import check_cache_refs, check_tenant
from contextcache.process.crash_points import crash_point
from contextcache.requests import TenantShares
from contextcache.wire.tracing import child_span
from kv_sidecar.catalog import ContextCatalog
from kv_sidecar.crash_points import BETWEEN_PULLED_BLOCKS
from kv_sidecar.format.ids import differences, engine_fingerprint
from kv_sidecar.format.manifest import block_checksum, check_block_checksums, first_blocks
from kv_sidecar.limits import Limits
from kv_sidecar.recent import RecentNames
from kv_sidecar.runtime import Runtime
from kv_sidecar.saves import NewSave
from kv_sidecar.sealed.prefixes import Found, PrefixQuestion
from kv_sidecar.store.writer import SharedTier
from kv_sidecar.tiers.store import Buffer

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.05
_PENDING_QUESTIONS = 40
"""Two seconds, which is how long an engine waits for a pull; after that the generation before is better than none."""
ABSENT_MS, ABSENT_MAX = 10_000, 65_536
_MEASURED_MS = 500
"""Shortest time over which the rate of a pull is measured."""
_SURELY = 2
"""A pull misses its time if it would take twice as long as is left, because rates change."""
MAX_REFS = 8
"""A session has two generations; the rest is room."""


_ANY = "*"
_HOST = r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])"
_ADDRESS = re.compile(_HOST + r":(?P<port>[1-9][0-9]{0,4})", re.ASCII)
_ENTRY = re.compile(_HOST + r"(?::[1-9][0-9]{0,4})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PulledFile:
    """A block file that came whole."""

    index: int
    """In the peer's manifest."""
    data: Buffer
    release: Callable[[], None]
    """To be called once: its memory is counted until then."""

    def taken(self, _: object) -> None:
        """Release it; a task's callback."""
        self.release()


@dataclass(frozen=True, slots=True)
class Coming:
    """Estimate of a pull by its rate so far."""

    left_ms: float
    """Time until all of it has come."""
    us_per_token: float
    """Time of the link for one token."""
    num_tokens: int
    """Tokens of the KV that it brings."""


class Peer(Protocol):
    """Another sidecar, for the length of one pull. Each call ends within the pull's time."""

    async def manifest(self, tenant: TenantId, cache_ref: CacheRef) -> Manifest:
        """Return a sealed manifest. Raises CacheRefNotFound, SidecarUnavailable."""
        ...

    async def match(self, question: PrefixQuestion, tokens_min: int) -> Sequence[Found]:
        """Return its KV that begins most like a prompt, the longest first. Raises SidecarUnavailable."""
        ...

    def block_files(
        self, manifest: Manifest, rank: int, block_indices: Sequence[int]
    ) -> AsyncGenerator[PulledFile, None]:
        """Yield whole block files in the order asked for; the receiver releases each one.

        Raises CacheRefNotFound, FingerprintMismatch, CorruptBlock, SidecarUnavailable.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


ConnectPeer: TypeAlias = Callable[[str, float], Peer]
"""Return the peer at an address; its calls end within this many seconds."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """First tokens of another context's KV, pulled as KV of its own name."""

    cache_ref: CacheRef
    """Its own name; where that is the other's, all of it comes, as it is there."""
    num_tokens: int
    """At most: whole blocks of them are fetched, or all there is if that is no more."""
    group: SessionId
    """Conversation it is kept for."""
    expires_at_ms: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Order of a pull: the KV and its source."""

    tenant: TenantId
    cache_refs: tuple[CacheRef, ...]
    """Best first."""
    peer: str
    """`host:port`; empty: the shared store alone."""
    prefix: Prefix | None = None
    """None: all of it, under the name it has there."""

    @property
    def names(self) -> tuple[CacheRef, ...]:
        """Names of the KV in this sidecar, best first."""
        return self.cache_refs if self.prefix is None else (self.prefix.cache_ref,)

    def check(self) -> None:
        """Raise InvalidRequest for a field that cannot be."""
        check_tenant(self.tenant)
        if not 0 < len(self.cache_refs) <= MAX_REFS:
            raise InvalidRequest(f"a pull must name 1 to {MAX_REFS} cache_refs", param="cache_refs")
        check_cache_refs(self.cache_refs, param="cache_refs")


@dataclass(slots=True)
class Transfer:
    """A context on its way: the block files of all ranks."""

    ours: Manifest
    """The manifest that the pull seals here."""
    source: Manifest
    """The peer's manifest."""
    peer: Peer
    began_at_ms: int
    wanted_bytes: float = 0
    come_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PullReply:
    """Answer to an order."""

    outcome: Literal["started", "present", "refused"]
    reason: str = ""
    """Why it was refused, as a short fixed phrase."""


@dataclass
class Pulls:
    """The pulls of one sidecar; owns their tasks. Used from one event loop."""

    catalog: ContextCatalog
    runtime: Runtime
    engine: EngineRanks
    rules: PeerRules
    limits: Limits
    connect: ConnectPeer
    shared: SharedTier | None
    """Learns of pulled KV; None: there is no store."""
    store: Peer | None
    """Store that all pods share, asked for KV that a peer does not have; None: there is none."""
    is_draining: bool = False
    """Whether new pulls are refused."""
    _tasks: dict[asyncio.Task[None], Wanted] = field(default_factory=dict)
    _transfers: dict[tuple[TenantId, CacheRef], Transfer] = field(default_factory=dict)
    _absent: RecentNames[tuple[TenantId, CacheRef]] = field(
        default_factory=lambda: RecentNames(keep_ms=ABSENT_MS, max_names=ABSENT_MAX)
    )
    """KV that the store did not have, or not in time: asked for again it would stay pending for ever."""

    @property
    def num_pulls(self) -> int:
        """Pulls under way."""
        return len(self._tasks)

    def start(self, wanted: Wanted) -> PullReply:
        """Begin a pull unless there is nothing to do or it is not possible. Raises InvalidRequest."""
        wanted.check()
        if len(better := self._better_than_what_is_here(wanted)) < len(wanted.names):
            wanted = replace(wanted, cache_refs=better)
        reply = self._reply(wanted)
        if reply.outcome != "started":
            self.runtime.metrics.pulls.labels(reply.reason or reply.outcome).inc()
            return reply
        self.catalog.refs.expect(wanted.tenant, wanted.names)
        task = asyncio.create_task(self._run(wanted))
        self._tasks[task] = wanted
        task.add_done_callback(self._ended)
        return reply

    def will_miss(self, tenant: TenantId, cache_ref: CacheRef, wait_ms: int, compute_us_per_token: float) -> bool:
        """Return whether a pull under way surely takes longer than `wait_ms`, and computing the rest is faster."""
        coming = self.coming(tenant, cache_ref)
        if coming is None or not compute_us_per_token:
            return False
        return coming.left_ms > _SURELY * wait_ms and coming.us_per_token > compute_us_per_token

    def coming(self, tenant: TenantId, cache_ref: CacheRef) -> Coming | None:
        """Return the estimate of a pull under way; None without one, and before its rate is measured."""
        transfer = self._transfers.get((tenant, cache_ref))
        elapsed_ms = self.runtime.clock.now_ms() - transfer.began_at_ms if transfer is not None else 0
        if transfer is None or not transfer.come_bytes or elapsed_ms < _MEASURED_MS:
            return None
        bytes_per_ms, num_tokens = transfer.come_bytes / elapsed_ms, len(transfer.ours.token_ids)
        return Coming(
            left_ms=max(transfer.wanted_bytes - transfer.come_bytes, 1) / bytes_per_ms,
            us_per_token=transfer.ours.size_bytes / num_tokens / bytes_per_ms * 1000,
            num_tokens=num_tokens,
        )

    async def close(self) -> None:
        """Refuse new pulls, break off those going on and wait for their end."""
        self.is_draining = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _better_than_what_is_here(self, wanted: Wanted) -> tuple[CacheRef, ...]:
        """Return the refs before the first that is here: a session that comes back has its older KV here."""
        tenant, now_ms = wanted.tenant, self.runtime.clock.now_ms()
        better = takewhile(lambda ref: not self.catalog.holds(tenant, ref), wanted.names)
        return tuple(ref for ref in better if wanted.peer or self._absent.added_at_ms((tenant, ref), now_ms) is None)

    def _reply(self, wanted: Wanted) -> PullReply:
        if self.is_draining:
            return PullReply("refused", "draining")
        if not wanted.cache_refs:
            return PullReply("present")
        if not (self.rules.allow(wanted.peer) if wanted.peer else self.store):
            return PullReply("refused", "peer_not_allowed")
        if self.engine.fingerprint is None:
            return PullReply("refused", "no_engine")
        is_prefix, half = wanted.prefix is not None, max(1, self.limits.max_pulls // 2)
        pulls = TenantShares(self.limits.max_pulls, (it.tenant for it in self._tasks.values()))
        of_kind = (it.tenant for it in self._tasks.values() if (it.prefix is not None) == is_prefix)
        # Half of all pulls may be of prefixes. Turns that moved have their half, however many tenants' prefixes come.
        enough = all if is_prefix else any
        takes = enough(it.takes(wanted.tenant) for it in (pulls, TenantShares(half, of_kind)))
        return PullReply("started") if takes else PullReply("refused", "too_many_pulls")

    async def _run(self, wanted: Wanted) -> None:
        began_at_s = time.monotonic()
        outcome = "internal_error"
        try:
            with child_span("sidecar pull"):
                async with asyncio.timeout(self.limits.pull_timeout_s) as deadline:
                    await self._pull(wanted, deadline)
            outcome = "pulled"
        except TimeoutError:
            outcome = "deadline"
        except ContextCacheError as exc:
            outcome = exc.code
        except asyncio.CancelledError:
            outcome = "draining"
            raise
        finally:
            if outcome != "pulled" and not wanted.peer:
                for ref in wanted.names:
                    self._absent.add((wanted.tenant, ref), self.runtime.clock.now_ms())
            self.runtime.metrics.pulls.labels(outcome).inc()
            self.runtime.metrics.pull_seconds.observe(time.monotonic() - began_at_s)
            log.info("pull ended", extra={"outcome": outcome, "cache_ref": wanted.names[0], "peer": wanted.peer})

    async def _pull(self, wanted: Wanted, deadline: asyncio.Timeout) -> None:
        # Before the first question: a deletion that comes while the peer answers is one during the pull.
        started_at_ms = self.runtime.clock.now_ms()
        if not wanted.peer:
            assert self.store is not None, "a store is open"
            await self._pull_from(self.store, wanted, deadline, started_at_ms)
            return
        peer = self.connect(wanted.peer, self.limits.pull_timeout_s)
        try:
            await self._pull_from(peer, wanted, deadline, started_at_ms)
        except (CacheRefNotFound, SidecarUnavailable):
            if self.store is None or wanted.prefix is not None:
                raise
            await self._pull_from(self.store, wanted, deadline, started_at_ms)
        finally:
            await peer.close()

    async def _pull_from(self, peer: Peer, wanted: Wanted, deadline: asyncio.Timeout, started_at_ms: int) -> None:
        manifest = await self._find(wanted, peer)
        ours = (
            manifest
            if wanted.prefix is None or wanted.prefix.cache_ref == manifest.cache_ref
            else first_blocks(
                manifest,
                wanted.prefix.num_tokens,
                cache_ref=wanted.prefix.cache_ref,
                session_id=wanted.prefix.group,
                expires_at_ms=min(wanted.prefix.expires_at_ms, manifest.expires_at_ms),
            )
        )
        if (ends_at_s := deadline.when()) is not None:  # the bytes have their time
            deadline.reschedule(ends_at_s + ours.size_bytes / self.limits.pull_bytes_per_s_min)
        await self._save(Transfer(ours, manifest, peer, self.runtime.clock.now_ms()), started_at_ms)

    async def _find(self, wanted: Wanted, peer: Peer) -> Manifest:
        """Return the first manifest that can be used here; the others are then no longer waited for."""
        missed: ContextCacheError = CacheRefNotFound("the peer has none of these cache_refs")
        for cache_ref in wanted.cache_refs:
            try:
                manifest = await self._sealed(peer, wanted.tenant, cache_ref)
                self._check(manifest, wanted.tenant, cache_ref)
            except (CacheRefNotFound, FingerprintMismatch) as exc:
                missed = exc
                continue
            if wanted.prefix is None:
                self.catalog.refs.expect_no_more(wanted.tenant, [ref for ref in wanted.cache_refs if ref != cache_ref])
                # Another pull may fetch the others by the time this one ends.
                if (task := asyncio.current_task()) is not None:
                    self._tasks[task] = replace(wanted, cache_refs=(cache_ref,))
            return manifest
        raise missed

    async def _sealed(self, peer: Peer, tenant: TenantId, cache_ref: CacheRef) -> Manifest:
        """Return the peer's manifest; one that is still being saved there is waited for, a moment."""
        for _ in range(_PENDING_QUESTIONS):
            try:
                return await peer.manifest(tenant, cache_ref)
            except CacheRefPending:
                await asyncio.sleep(_ASK_AGAIN_S)
        return await peer.manifest(tenant, cache_ref)

    def _check(self, manifest: Manifest, tenant: TenantId, cache_ref: CacheRef) -> None:
        """Raise FingerprintMismatch for KV of another engine, CorruptBlock for another manifest than requested."""
        if (manifest.tenant, manifest.cache_ref) != (tenant, cache_ref):
            raise CorruptBlock("the peer sent a different manifest")
        usable = (self.engine.fingerprint, self.engine.world_size)
        is_small = any(group.block_tokens < self.limits.block_tokens for group in manifest.groups)
        if (engine_fingerprint(manifest.fingerprint), manifest.world_size) != usable or is_small:
            raise FingerprintMismatch("the peer's KV is from an engine with a different fingerprint")
        check_block_checksums(manifest)

    async def _save(self, transfer: Transfer, started_at_ms: int) -> None:
        """Bring all ranks' block files in and seal; all or nothing."""
        ours = transfer.ours
        new = NewSave(
            tenant=ours.tenant,
            session_id=ours.session_id,
            cache_ref=ours.cache_ref,
            fingerprint=ours.fingerprint,
            rank=0,
            world_size=ours.world_size,
            token_ids=ours.token_ids,
            expires_at_ms=ours.expires_at_ms,
            started_at_ms=started_at_ms,
            groups=ours.groups,
            tail_ref=ours.tail_ref,
            source="object" if transfer.peer is self.store else "peer",
        )
        name = (ours.tenant, ours.cache_ref)
        self._transfers[name] = transfer
        try:
            async with asyncio.TaskGroup() as saves:
                for rank in range(ours.world_size):
                    saves.create_task(self._save_rank(transfer, replace(new, rank=rank)))
        except BaseException as exc:
            await self.catalog.abandon_save(ours.cache_ref)
            if isinstance(exc, BaseExceptionGroup):
                raise _cause(exc) from exc
            raise
        finally:
            if self._transfers.get(name) is transfer:  # a second pull of it may have begun
                del self._transfers[name]

    async def _save_rank(self, transfer: Transfer, new: NewSave) -> None:
        ours, source, peer = transfer.ours, transfer.source, transfer.peer
        prepared = await self.catalog.prepare_save(new)
        if prepared.missing_files:
            transfer.wanted_bytes += ours.size_bytes * len(prepared.missing_files) / len(ours.files) / ours.world_size
            there = {(file.group, file.name, file.first_token): index for index, file in enumerate(source.files)}
            missing = (ours.files[index] for index in prepared.missing_files)
            asked = [there[file.group, file.name, file.first_token] for file in missing]
            here = dict(zip(asked, prepared.missing_files, strict=True))
            async with aclosing(peer.block_files(source, new.rank, asked)) as files:
                await self._take_all(transfer, new, here, files)
        await self.catalog.seal(new.cache_ref, new.rank)

    async def _take_all(
        self, transfer: Transfer, new: NewSave, here: Mapping[int, int], files: AsyncIterator[PulledFile]
    ) -> None:
        """Keep files as they come; the next ones travel while the disk makes these durable, as many as have slots.

        After a failure all takes run to their end: the first to fail may know only that the save was dropped.
        """
        takes: list[asyncio.Task[None]] = []
        try:
            async for file in files:
                takes.append(asyncio.create_task(self._take(transfer, new, here[file.index], file)))
                takes[-1].add_done_callback(file.taken)
                if any(take.done() and take.exception() for take in takes):
                    break
            ends = await asyncio.gather(*takes, return_exceptions=True)
        finally:
            for take in takes:
                take.cancel()
            await asyncio.gather(*takes, return_exceptions=True)
        if failed := [end for end in ends if end is not None]:
            raise BaseExceptionGroup("block files not taken", failed)

    async def _take(self, transfer: Transfer, new: NewSave, block_index: int, file: PulledFile) -> None:
        vouched = block_checksum(transfer.source, file.index, new.rank)
        size_bytes = await self.catalog.take_block(new.cache_ref, new.rank, block_index, file.data, vouched=vouched)
        transfer.come_bytes += size_bytes
        self.runtime.metrics.pulled_bytes.inc(size_bytes)
        crash_point(BETWEEN_PULLED_BLOCKS)

    def _ended(self, task: asyncio.Task[None]) -> None:
        wanted = self._tasks.pop(task)
        # Also for a task that was cancelled before it ran.
        self.catalog.refs.expect_no_more(wanted.tenant, wanted.names)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("pull failed", exc_info=error)


class PeerRules:
    """Peers by `host:port`, by host with any port, by network in CIDR notation, or all (`*`)."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raise ValueError for an entry that is none of these."""
        self._any = False
        self._names: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        for entry in entries:
            if entry == _ANY:
                self._any = True
            elif "/" in entry:
                self._networks.append(ip_network(entry))
            elif _ENTRY.fullmatch(entry):
                self._names.add(entry.lower())
            else:
                raise ValueError(f"{entry!r} must be host:port, a host, a network or '*'")

    def allow(self, address: str) -> bool:
        """Return whether `address`, a plain `host:port`, may be pulled from. Names are compared, never resolved."""
        match = _ADDRESS.fullmatch(address)
        if match is None or int(match["port"]) > 65535:
            return False
        host = match["host"].lower()
        if self._any or host in self._names or address.lower() in self._names:
            return True
        with suppress(ValueError):
            ip = ip_address(host.strip("[]"))
            return any(ip in network for network in self._networks)
        return False


class EngineRanks:
    """The ranks of the last engine."""

    def __init__(self) -> None:
        self.world_size = 0
        """Ranks of the engine; 0 before the first handshake."""
        self._fingerprints: dict[int, str] = {}
        self._fingerprint_json = ""
        """JSON of the rank that introduced itself last: the differences of a new engine are logged."""

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints in rank order; empty before the first handshake."""
        return [fingerprint for _, fingerprint in sorted(self._fingerprints.items())]

    @property
    def fingerprint(self) -> str | None:
        """The one fingerprint of all ranks; None when no rank is known, or while the ranks differ."""
        known = set(self._fingerprints.values())
        return known.pop() if len(known) == 1 else None

    def introduce(self, rank: int, world_size: int, fingerprint: str, fingerprint_json: str) -> None:
        """Record a rank. Another number of ranks is another engine."""
        changed = differences(self._fingerprint_json, fingerprint_json) if self._fingerprint_json else []
        log.info("engine registered", extra={"fingerprint": fingerprint, "rank": rank})
        if changed:
            log.warning("engine fingerprint changed", extra={"changed": changed})
        if world_size != self.world_size:
            self._fingerprints.clear()
        self.world_size = world_size
        self._fingerprints[rank] = fingerprint
        self._fingerprint_json = fingerprint_json


def _cause(failed: BaseExceptionGroup) -> BaseException:
    """Return the failure that ended a save. The tasks beside it know only that the save was dropped."""
    wanted = failed.subgroup(lambda exc: not isinstance(exc, (ContextDeleted, BaseExceptionGroup)))
    told: BaseException = wanted or failed
    while isinstance(told, BaseExceptionGroup):
        told = told.exceptions[0]
    return told
