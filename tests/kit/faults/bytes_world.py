"""A small world whose stored bytes are counted: real sidecars, manager and Valkey, engines and turns played.

Two pods with a sidecar each (one with an arena, one that takes frames and keeps nothing in memory), one manager.
Engines save made-up pages; turns make their calls in the order of vllm_plugin/turn/settlement.py, deletes and touches
in that of the gateway. A part that dies is started again. What was acknowledged is noted; `count` says what is wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from context_manager.client import ContextManagerClient
from contextcache.errors import CacheRefPending, ContextCacheError, StoreUnavailable
from contextcache.model import (
    CacheRef,
    CacheSessionMetadata,
    NewSession,
    Segment,
    SegmentKind,
    SessionId,
    TtlPolicy,
    TurnCommit,
)
from contextcache.names import new_cache_ref, new_session_id
from contextcache.process.crash_points import VARIABLE
from contextcache.terms import Terms
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import KVSidecarClient
from kv_sidecar.saves import NewSave
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import BLOCK_TOKENS, FINGERPRINT, TENANT
from tests.kit.ports import free_port
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer

ROOT = Path(__file__).parents[3]
LEASE_MS = 1_000
SHORT_TTL_S = 2
LONG_TTL_S = 3_600
ORPHAN_AFTER_S = 1
SAVE_DEADLINE_S = 2
MEMORY_BYTES = 8 << 20
"""More than a round stores: all of it fits when it is counted."""
START_DEADLINE_S = 120
PASS_DEADLINE_S = 60
_CALL_S = 10.0


class Part:
    """A process that can be told to die at a point, and is started again when it has."""

    def __init__(self, name: str, module: str, env: Mapping[str, str], directory: Path) -> None:
        self.name = name
        self.restarts = 0
        self._module = module
        self._crash_file = directory / f"{name}.crash"
        self._log = directory / f"{name}.log"
        self._env = {**os.environ, VARIABLE: str(self._crash_file), **env}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", self._module]
            self._process = subprocess.Popen(command, env=self._env, cwd=ROOT, stdout=log, stderr=log)

    def arm(self, point: str, *, passing: int = 1) -> None:
        """Have it die at the next passing of a point, or at a later one."""
        beside = self._crash_file.with_suffix(".new")
        beside.write_text(f"{point}@{passing}")
        beside.rename(self._crash_file)

    def disarm(self) -> None:
        """Let it live. Harmless when the point has been passed."""
        self._crash_file.unlink(missing_ok=True)

    @property
    def is_armed(self) -> bool:
        return self._crash_file.exists()

    def has_died(self) -> bool:
        """Return whether it died since it was started; it may only die as it was told to."""
        assert self._process is not None
        code = self._process.poll()
        assert code in (None, -signal.SIGKILL), f"{self.name} ended with {code}: {self._log.read_text()[-3000:]}"
        return code is not None

    def told(self) -> str:
        """Return how busy the machine is, what the process does and what it logged last: why it may not serve."""
        assert self._process is not None
        with suppress(OSError):
            status = Path(f"/proc/{self._process.pid}/status").read_text()
            stack = Path(f"/proc/{self._process.pid}/wchan").read_text()
            state = " ".join(line for line in status.splitlines() if line.startswith(("State", "Threads")))
            return f"{self.name}: load {os.getloadavg()}, {state}, in {stack}, log {self._log.read_text()[-3000:]}"
        return f"{self.name}: load {os.getloadavg()}, gone, log {self._log.read_text()[-3000:]}"

    def kill(self) -> None:
        """End it like a crash; harmless when it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)


class Pod:
    """One sidecar and the engine beside it."""

    def __init__(self, name: str, directory: Path, *, manager: str, arena: bool) -> None:
        self.name = name
        self.address = f"127.0.0.1:{free_port()}"
        self.data = directory / name / "data"
        self._socket = directory / name / "s.sock" if arena else None
        self._metrics_port = free_port()
        self._engine: EngineRank | None = None
        self.client = KVSidecarClient(self.address, timeout_s=_CALL_S)
        (directory / name).mkdir()
        env = {
            "SIDECAR_LISTEN": self.address,
            "SIDECAR_DATA_DIR": str(self.data),
            "SIDECAR_UNIX_SOCKET": str(self._socket or ""),
            "SIDECAR_MEMORY_LIMIT_BYTES": str(MEMORY_BYTES) if arena else "0",
            "SIDECAR_BLOCK_TOKENS": str(BLOCK_TOKENS),
            "SIDECAR_PEERS": '["*"]',
            "SIDECAR_MANAGER": manager,
            "SIDECAR_ORPHAN_AFTER_S": str(ORPHAN_AFTER_S),
            "SIDECAR_COLLECT_INTERVAL_S": "0.3",
            "SIDECAR_BOUNDS": json.dumps(
                {"save_deadline_ms": SAVE_DEADLINE_S * 1000, "spare_ms": 0, "leftover_s": 1, "interrupted_ms": 1}
            ),
            "SIDECAR_METRICS_PORT": str(self._metrics_port),
            "SIDECAR_LOG_LEVEL": "WARNING",
        }
        self.part = Part(name, "tests.kit.bounded_sidecar", env, directory)

    @property
    def engine(self) -> EngineRank:
        assert self._engine is not None
        return self._engine

    async def await_serving(self) -> None:
        """Wait until the sidecar serves, and introduce the engine: it is asked before a pull."""
        engine: EngineRank | None = None

        async def is_introduced() -> bool:
            nonlocal engine
            assert not self.part.has_died(), f"{self.name} died at its start"
            with suppress(ContextCacheError):
                engine = await asyncio.to_thread(
                    EngineRank, self.address if self._socket is None else f"unix://{self._socket}"
                )
            return engine is not None

        await until(is_introduced, what=self.part.told, deadline_s=START_DEADLINE_S)
        former, self._engine = self._engine, engine
        if former is not None:
            # Not its arena: somebody may be writing there, to memory of a sidecar that is dead.
            former.client.close()

    def counted(self, name: str, **labels: str) -> float:
        """Return one sample of the sidecar's metrics, or the sum of those with these labels."""
        with urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=_CALL_S) as answer:
            text = answer.read().decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(
            sample.value
            for sample in samples
            if sample.name == f"contextcache_sidecar_{name}" and labels.items() <= sample.labels.items()
        )

    async def await_pass(self, since_s: float) -> None:
        """Wait for the end of a collector pass that began after a Unix time in s."""

        async def has_passed() -> bool:
            return await asyncio.to_thread(self.counted, "last_collect_timestamp_seconds") > since_s

        await until(has_passed, what="a collector pass", deadline_s=PASS_DEADLINE_S, despite=(OSError,))

    async def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        await self.client.close()
        self.part.kill()


@dataclass
class Known:
    """What was acknowledged of one session."""

    generation: int = 0
    expires_at_ms: int = 0
    """The earliest end it was ever given."""
    deleted: bool = False
    """Somebody has asked for it, answered or not."""


@dataclass
class Ledger:
    """What was acknowledged, and what was asked to be removed, whether it was answered or not."""

    sessions: dict[SessionId, Known] = field(default_factory=dict)
    sealed: dict[tuple[str, CacheRef], NewSave] = field(default_factory=dict)
    """By pod and ref: KV that must be there while a live session names it."""
    unwanted: set[tuple[str, CacheRef]] = field(default_factory=set)

    def seal(self, pod: str, new: NewSave) -> None:
        if (pod, new.cache_ref) not in self.unwanted:
            self.sealed[pod, new.cache_ref] = new

    def remove(self, pod: str, cache_ref: CacheRef) -> None:
        self.unwanted.add((pod, cache_ref))
        self.sealed.pop((pod, cache_ref), None)

    def remove_session(self, pod: str, session_id: SessionId) -> None:
        for (holder, ref), new in list(self.sealed.items()):
            if holder == pod and new.session_id == session_id:
                self.remove(pod, ref)

    def give_life(self, session: CacheSessionMetadata) -> None:
        """Note a session's end; the earliest ever counts, as a sidecar may not have heard of a later one."""
        known = self.sessions[session.session_id]
        known.generation = max(known.generation, session.generation)
        known.expires_at_ms = min(known.expires_at_ms or session.expires_at_ms, session.expires_at_ms)


class BytesWorld:
    """Valkey, one manager, two pods.

    `seal_first`: turns wait for their seal before they commit. `cluster`: Valkey is one, where the manager has a
    crash point more: a tenant's contexts are counted after the reservation.
    """

    def __init__(self, directory: Path, *, seal_first: bool = False, cluster: bool = False) -> None:
        self.seal_first = seal_first
        self.ledger = Ledger()
        self._valkey_directory = directory / "valkey"
        self._valkey_directory.mkdir()
        self._valkey = ValkeyServer(self._valkey_directory, cluster=cluster)
        address = f"127.0.0.1:{free_port()}"
        self.client = ContextManagerClient(address, timeout_s=_CALL_S)
        env = {
            "MANAGER_LISTEN": address,
            "MANAGER_REDIS_URL": self._valkey.url,
            "MANAGER_REDIS_TIMEOUT_S": str(_CALL_S),
            "MANAGER_MIN_TTL_S": "1",
            "MANAGER_SWEEP_INTERVAL_S": "0.2",
            "MANAGER_TENANT_CONTEXTS_MAX": "100000",
            "MANAGER_LOG_LEVEL": "ERROR",
        }
        self.manager = Part("manager", "context_manager", env, directory)
        self.pods = [
            Pod("arena", directory, manager=address, arena=True),
            Pod("frames", directory, manager=address, arena=False),
        ]
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def parts(self) -> list[Part]:
        return [self.manager, *(pod.part for pod in self.pods)]

    async def start(self) -> None:
        await asyncio.to_thread(self._valkey.start)
        for part in self.parts:
            part.start()
        await asyncio.gather(*(self._await(part) for part in self.parts))
        self._keepers = [asyncio.create_task(self._keep(part)) for part in self.parts]

    async def await_restarts(self, num_deaths: int) -> None:
        """Wait until so many parts in all have died and been started again."""

        async def are_up() -> bool:
            self._check_keepers()
            return sum(part.restarts for part in self.parts) >= num_deaths

        await until(are_up, what=lambda: "; ".join(part.told() for part in self.parts), deadline_s=START_DEADLINE_S)

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for pod in self.pods:
            await pod.close()
        await self.client.close()
        self.manager.kill()
        await asyncio.to_thread(self._valkey.stop)

    async def _keep(self, part: Part) -> None:
        while True:
            if part.has_died():
                part.start()
                await self._await(part)
                part.restarts += 1
            await asyncio.sleep(0.02)

    async def _await(self, part: Part) -> None:
        """Wait until a part that was started serves; it may not die meanwhile."""

        async def is_serving() -> bool:
            assert not part.has_died(), f"{part.name} died at its start"
            return await self.client.is_serving()

        if part is self.manager:
            await until(is_serving, what=part.told, deadline_s=START_DEADLINE_S)
        for pod in self.pods:
            if pod.part is part:
                await pod.await_serving()

    def _check_keepers(self) -> None:
        """Raise what ended a keeper: a part that died by itself."""
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()


class Player:
    """One client's random calls on a world, one after the other; several may play at once."""

    def __init__(self, world: BytesWorld, seed: str) -> None:
        self._world = world
        self._ledger = world.ledger
        self._manager = world.client
        self._random = random.Random(seed)
        self._serial = iter(range(10_000, 1 << 30))

    async def play(self) -> bool:
        """Make one call by chance; return whether there was something to do and it met no fault.

        A fault ends a call as it ends the real one; then the next one waits a moment.
        """
        acts = [self.create] * 4 + [self.turn] * 6 + [self.delete] * 2 + [self.fork] * 2
        acts += [self.rewind, self.touch, self.pull, self.half_save]
        act = self._random.choice(acts)
        if self._any_session() is None:
            act = self.create
        try:
            await act()
        except ContextCacheError:
            await asyncio.sleep(0.05)
            return False
        return True

    async def create(self) -> None:
        """Reserve, save, wait for the seal or not, register; or vanish in between."""
        pod = self._random.choice(self._world.pods)
        new = NewSession(
            tenant=TENANT,
            session_id=new_session_id(),
            model_id="tiny",
            ttl_s=self._random.choice([SHORT_TTL_S, LONG_TTL_S, LONG_TTL_S]),
            ttl_policy=self._random.choice([TtlPolicy.FIXED, TtlPolicy.SLIDING]),
        )
        lease_id = secrets.token_hex(16)
        self._ledger.sessions[new.session_id] = Known()
        try:
            session = await self._manager.reserve(new, lease_id=lease_id, lease_ttl_ms=LEASE_MS)
        except StoreUnavailable:
            await self._manager.abort_turn(TENANT, new.session_id, lease_id=lease_id)
            raise
        # Contexts of a few kinds, which share their first two blocks.
        prefix = range(first := 100 * self._random.randrange(3), first + 2 * BLOCK_TOKENS)
        await self._run(pod, session, lease_id, (*prefix, *self._fresh_tokens()), keep_segments=0)

    async def turn(self) -> None:
        """Begin, load or pull, save, commit in one order or the other; or abort, or vanish."""
        session_id = self._any_session()
        if session_id is None:
            return  # somebody else has just deleted the last one
        pod, lease_id = self._random.choice(self._world.pods), secrets.token_hex(16)
        try:
            session, segments = await self._manager.begin_turn(
                TENANT, session_id, lease_id=lease_id, lease_ttl_ms=LEASE_MS
            )
        except StoreUnavailable:
            await self._manager.abort_turn(TENANT, session_id, lease_id=lease_id)
            raise
        if pod.name != session.holder and session.cache_refs and self._random.random() < 0.6:
            await self._pull(pod, session)
        if self._random.random() < 0.2:
            await self._manager.renew_lease(TENANT, session_id, lease_id=lease_id, lease_ttl_ms=LEASE_MS)
        tokens = tuple(token for segment in segments for token in segment.token_ids)
        await self._run(pod, session, lease_id, (*tokens, *self._fresh_tokens()), keep_segments=len(segments))

    async def delete(self) -> None:
        """Unregister, then tell the sidecars: both, one or none of them."""
        session_id = self._any_session()
        if session_id is None:
            return  # somebody else has just deleted the last one
        self._ledger.sessions[session_id].deleted = True
        session = await self._manager.unregister_session_cache(TENANT, session_id)
        told = self._random.sample(self._world.pods, self._random.randrange(3))
        for pod in told:
            self._ledger.remove_session(pod.name, session_id)
            await pod.client.delete_context(TENANT, session_id=session_id, cache_refs=session.cache_refs)

    async def touch(self) -> None:
        """Give a session another life, and tell one sidecar."""
        session_id = self._any_session()
        if session_id is None:
            return  # somebody else has just deleted the last one
        ttl_s = self._random.choice([SHORT_TTL_S, LONG_TTL_S])
        known = self._ledger.sessions[session_id]
        if ttl_s == SHORT_TTL_S:
            # Whatever becomes of the call: the session may have this life from now on.
            known.expires_at_ms = min(known.expires_at_ms, _now_ms() + ttl_s * 1000)
        session = await self._manager.touch(TENANT, session_id, Terms(ttl_s=ttl_s))
        pod = self._random.choice(self._world.pods)
        await pod.client.touch_context(TENANT, session_id, session.expires_at_ms)

    async def pull(self) -> None:
        """Have a pod fetch a session's KV, as for a turn that then does not come."""
        session_id = self._any_session()
        if session_id is None:
            return  # somebody else has just deleted the last one
        session = await self._manager.locate(TENANT, session_id)
        pod = self._random.choice(self._world.pods)
        if session.cache_refs and pod.name != session.holder:
            await self._pull(pod, session)

    async def rewind(self) -> None:
        """Take a session back to its first turn."""
        session_id = self._any_session()
        if session_id is None:
            return  # somebody else has just deleted the last one
        session = await self._manager.rewind(TENANT, session_id, generation=1)
        self._ledger.give_life(session)
        if session.ttl_policy is TtlPolicy.SLIDING:
            await self._random.choice(self._world.pods).client.touch_context(TENANT, session_id, session.expires_at_ms)

    async def fork(self) -> None:
        """Reserve, fork the KV, commit, as the gateway; or vanish in between."""
        source_id = self._any_session()
        if source_id is None:
            return  # somebody else has just deleted the last one
        source = await self._manager.locate(TENANT, source_id)
        pod = next(pod for pod in self._world.pods if pod.name == source.holder)
        new = NewSession(TENANT, new_session_id(), "tiny", ttl_s=self._random.choice([SHORT_TTL_S, LONG_TTL_S]))
        lease_id, ref = secrets.token_hex(16), new_cache_ref()
        self._ledger.sessions[new.session_id] = Known()
        reserved = await self._manager.reserve(new, lease_id=lease_id, lease_ttl_ms=LEASE_MS)
        kv = None
        with suppress(ContextCacheError):
            kv = await pod.client.fork_context(
                TENANT,
                source.cache_refs,
                session_id=new.session_id,
                cache_ref=ref,
                expires_at_ms=reserved.expires_at_ms,
            )
        if self._random.random() < 0.2:
            return
        commit = TurnCommit(TENANT, new.session_id, lease_id, 0, 0, (), "" if kv is None else ref, pod.name)
        try:
            try:
                forked = await self._manager.fork(source_id, commit=commit)
            except StoreUnavailable:
                forked = await self._manager.fork(source_id, commit=commit)
        except ContextCacheError as exc:
            if exc.http_status < 500:
                await self._drop(pod, ref)
            raise
        self._ledger.give_life(forked)
        if kv is not None:
            manifest, _ = await pod.client.get_manifest(TENANT, ref)
            self._ledger.seal(pod.name, self._new_save(new.session_id, manifest.token_ids, ref, forked.expires_at_ms))

    async def half_save(self) -> None:
        """Save as an engine that dies before its seal: some blocks of a turn whose lease nobody ends."""
        pod = self._random.choice(self._world.pods)
        new = self._new_save(new_session_id(), self._fresh_tokens(), new_cache_ref(), _now_ms() + LONG_TTL_S * 1000)
        await asyncio.to_thread(_send, pod.engine, new, 1)

    async def save_orphan(self, pod: Pod) -> NewSave:
        """Seal KV of its own that no session names, five whole blocks and a tail."""
        tokens = tuple(next(self._serial) for _ in range(5 * BLOCK_TOKENS + 1))
        new = self._new_save(new_session_id(), tokens, new_cache_ref(), _now_ms() + LONG_TTL_S * 1000)
        await asyncio.to_thread(_send, pod.engine, new, None)
        assert await asyncio.to_thread(pod.engine.client.seal, new.cache_ref, new.rank, 10)
        return new

    def _any_session(self) -> SessionId | None:
        known = [name for name, one in self._ledger.sessions.items() if not one.deleted and one.generation]
        return self._random.choice(known) if known else None

    def _fresh_tokens(self) -> tuple[int, ...]:
        return tuple(next(self._serial) for _ in range(self._random.randrange(1, 14)))

    async def _run(
        self, pod: Pod, session: CacheSessionMetadata, lease_id: str, tokens: tuple[int, ...], *, keep_segments: int
    ) -> None:
        """Save under a new ref and settle; the turn's own order."""
        ref = new_cache_ref()
        new = self._new_save(session.session_id, tokens, ref, session.expires_at_ms)
        fate = self._random.choice(["commit"] * 8 + ["abort", "vanish"])
        saving = asyncio.create_task(self._save(pod, new))
        try:
            if self._world.seal_first or fate == "vanish":
                await asyncio.wait([saving])
            if fate == "commit":
                await self._commit(pod, session, new, lease_id, keep_segments)
            elif fate == "abort":
                self._ledger.remove(pod.name, ref)
                with suppress(ContextCacheError):
                    await pod.client.interrupt_save(TENANT, ref)
                await self._manager.abort_turn(TENANT, session.session_id, lease_id=lease_id)
        finally:
            await asyncio.wait([saving])

    async def _save(self, pod: Pod, new: NewSave) -> None:
        with suppress(ContextCacheError):
            await asyncio.to_thread(_send, pod.engine, new, None)
            if await asyncio.to_thread(pod.engine.client.seal, new.cache_ref, new.rank, 10):
                self._ledger.seal(pod.name, new)

    async def _commit(
        self, pod: Pod, before: CacheSessionMetadata, new: NewSave, lease_id: str, keep_segments: int
    ) -> None:
        own = new.token_ids[before.num_tokens :] if keep_segments else new.token_ids
        commit = TurnCommit(
            tenant=TENANT,
            session_id=before.session_id,
            lease_id=lease_id,
            expected_generation=before.generation,
            keep_segments=keep_segments,
            segments=(Segment(SegmentKind.PROMPT, own, text="x"),),
            cache_ref=new.cache_ref,
            holder=pod.name,
        )
        send = self._manager.commit_turn if before.generation else self._manager.register_session_cache
        try:
            try:
                committed = await send(commit)
            except StoreUnavailable:
                committed = await send(commit)
        except ContextCacheError:
            await self._drop(pod, new.cache_ref)
            raise
        self._ledger.give_life(committed)
        if before.previous_cache_ref:
            await self._drop(pod, before.previous_cache_ref)
        if committed.ttl_policy is TtlPolicy.SLIDING:
            await pod.client.touch_context(TENANT, before.session_id, committed.expires_at_ms)

    async def _drop(self, pod: Pod, cache_ref: CacheRef) -> None:
        self._ledger.remove(pod.name, cache_ref)
        with suppress(ContextCacheError):
            await pod.client.delete_context(TENANT, cache_refs=(cache_ref,))

    async def _pull(self, pod: Pod, session: CacheSessionMetadata) -> None:
        (peer,) = (other for other in self._world.pods if other is not pod)
        await pod.client.pull_context(TENANT, session.cache_refs, peer=peer.address)
        with suppress(ContextCacheError):  # as the gateway: the pull goes on
            await self._manager.note_holder(TENANT, session.session_id, holder=pod.name)
        for _ in range(20):
            try:
                manifest, _ = await pod.client.get_manifest(TENANT, session.cache_refs[0])
            except CacheRefPending:
                await asyncio.sleep(0.05)
                continue
            new = self._new_save(session.session_id, manifest.token_ids, manifest.cache_ref, manifest.expires_at_ms)
            self._ledger.seal(pod.name, new)
            return

    @staticmethod
    def _new_save(session_id: SessionId, tokens: tuple[int, ...], ref: CacheRef, expires_at_ms: int) -> NewSave:
        return NewSave(
            tenant=TENANT,
            session_id=session_id,
            cache_ref=ref,
            fingerprint=FINGERPRINT,
            rank=0,
            world_size=1,
            token_ids=tokens,
            expires_at_ms=expires_at_ms,
            started_at_ms=_now_ms(),
        )


def _send(engine: EngineRank, new: NewSave, num_blocks: int | None) -> None:
    """Announce a save and send what is missing, or the first `num_blocks` of it; give back what was not taken."""
    prepared = engine.prepare(new)
    requests: list[pb.SaveBlocksRequest] = []
    try:
        # Each with a slot, before the first is sent: nobody is lent one after they were given back.
        requests.extend(engine.requests(new, list(prepared.missing_files[:num_blocks])))
        engine.client.save_blocks(iter(requests), timeout_s=_CALL_S)
    finally:
        if engine.arena is not None:
            engine.client.return_slots(
                engine.arena.borrower, [slot.slot_id for request in requests for slot in request.slots]
            )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
