"""Sessions that are created, left, continued, aborted, rewound, touched, deleted and let expire; and what is left.

`SessionChurn` knows which sessions must be there at the end. `what_is_wrong` reads every key of a store and says which
of them do not belong together.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from random import Random

import redis
from typing_extensions import override

from context_manager.layout import CONTEXT_BYTES, SWEEPER_KEY, ledger_key
from context_manager.limits import SessionKey
from contextcache.errors import (
    ContextBusy,
    ContextExpired,
    ContextNotFound,
    GenerationMismatch,
    LeaseLost,
)
from contextcache.model import NewSession, TtlPolicy, TurnCommit, Usage
from contextcache.names import NUM_SHARDS, new_session_id, shard_of
from contextcache.terms import Terms
from tests.kit.session_store import script_keys
from tests.kit.turn_load import TENANT, SessionRecord, TurnLoad
from tests.kit.until import until

SHORT_TTL_S, LONG_TTL_S = 1, 3600
_LEASE_MS = 1500
_FREE = {"place", "usage", "counted", "bytes"}
"""Kinds of keys that outlive the sessions they are about."""


@dataclass
class Outcome:
    """What must be at the end."""

    live: set[str] = field(default_factory=set)
    """Acknowledged, long-lived and never deleted."""
    maybe: set[str] = field(default_factory=set)
    """Their last call ended in another way than asked for: there or not."""


class SessionChurn(TurnLoad):
    """Workers that go from session to session; `num_sessions` of them at once."""

    def __init__(self, addresses: list[str], *, num_sessions: int, seed: int = 0) -> None:
        super().__init__(addresses, num_sessions=num_sessions, lease_ms=_LEASE_MS)
        self.outcome = Outcome()
        self._random = Random(seed)

    @override
    async def _work(self, record: SessionRecord) -> None:
        while not self._stopping:
            one = SessionRecord(f"ctx_{secrets.token_hex(8)}")
            try:
                await self._life(one)
            except (ContextBusy, ContextNotFound, ContextExpired, LeaseLost, GenerationMismatch):
                self.outcome.live.discard(one.session_id)
                self.outcome.maybe.add(one.session_id)
            record.acknowledged += one.acknowledged

    async def _life(self, one: SessionRecord) -> None:
        name, chance = one.session_id, self._random.random
        ttl_s = SHORT_TTL_S if chance() < 0.4 else LONG_TTL_S
        policy = TtlPolicy.SLIDING if chance() < 0.5 else TtlPolicy.FIXED
        lease_id = secrets.token_hex(8)
        new = NewSession(TENANT, name, "toy", ttl_s=ttl_s, ttl_policy=policy)
        await self._asked(lambda c: c.reserve(new, lease_id=lease_id, lease_ttl_ms=self._lease_ms))
        if (left := chance()) < 0.1:
            return  # its process died
        if left < 0.2:
            await self._asked(lambda c: c.abort_turn(TENANT, name, lease_id=lease_id))
            return
        await self._asked(lambda c: c.renew_lease(TENANT, name, lease_id=lease_id, lease_ttl_ms=self._lease_ms))
        await self._commit(one, 0, self._commit_of(one, lease_id, 0, generation=0))
        if ttl_s == LONG_TTL_S:
            self.outcome.live.add(name)
        for number in range(1, self._random.randrange(4)):
            if chance() < 0.3:
                await self._left_turn(name)
            else:
                await self._turn(one, number)
        if chance() < 0.3:
            pod = f"pod-{self._random.randrange(9)}"
            await self._asked(lambda c: c.note_holder(TENANT, name, holder=pod))
        if chance() < 0.3:
            batch_id = secrets.token_hex(8)
            await self._asked(lambda c: c.add_usage(TENANT, batch_id, [Usage("app", {"turns": 1})]))
        if chance() < 0.3:
            await self._asked(lambda c: c.rewind(TENANT, name, generation=1))
        if chance() < 0.3:
            await self._forked(name)
        if chance() < 0.3:
            await self._touched(name)
        if chance() < 0.5:
            await self._deleted(name)

    async def _left_turn(self, name: str) -> None:
        """Begin a turn that is aborted, or whose process dies."""
        lease_id = secrets.token_hex(8)
        await self._asked(lambda c: c.begin_turn(TENANT, name, lease_id=lease_id, lease_ttl_ms=self._lease_ms))
        if self._random.random() < 0.7:
            await self._asked(lambda c: c.abort_turn(TENANT, name, lease_id=lease_id))

    async def _forked(self, name: str) -> None:
        """Fork into a context of the same shard, which shares the segments; it may outlive its source or not."""
        lease_id, shard = secrets.token_hex(8), shard_of(TENANT, name)
        child = next(one for one in iter(new_session_id, "") if shard_of(TENANT, one) == shard)
        self.outcome.maybe.add(child)
        new = NewSession(TENANT, child, "toy", ttl_s=SHORT_TTL_S if self._random.random() < 0.4 else LONG_TTL_S)
        await self._asked(lambda c: c.reserve(new, lease_id=lease_id, lease_ttl_ms=self._lease_ms))
        commit = TurnCommit(TENANT, child, lease_id, 0, 0, (), "", "pod")
        await self._asked(lambda c: c.fork(name, commit=commit))
        if self._random.random() < 0.5:
            await self._deleted(child)

    async def _touched(self, name: str) -> None:
        ttl_s = SHORT_TTL_S if self._random.random() < 0.5 else LONG_TTL_S
        self.outcome.live.discard(name)
        self.outcome.maybe.add(name)
        await self._asked(lambda c: c.touch(TENANT, name, Terms(ttl_s=ttl_s, metadata={"touched": "yes"})))
        self.outcome.maybe.discard(name)
        if ttl_s == LONG_TTL_S:
            self.outcome.live.add(name)

    async def _deleted(self, name: str) -> None:
        self.outcome.live.discard(name)
        try:
            await self._asked(lambda c: c.unregister_session_cache(TENANT, name))
        except (ContextNotFound, ContextExpired):
            return


async def until_nothing_is_wrong(port: int, outcome: Outcome, *, within_s: float = 90.0) -> int:
    """Wait until the store holds exactly what it must; return how many sessions that is. Raises AssertionError."""

    async def look() -> tuple[list[str], int]:
        wrong, num_live = await asyncio.to_thread(what_is_wrong, port, outcome)
        return wrong[:20], num_live

    _, num_live = await until(
        look, is_so=lambda seen: not seen[0], what="nothing is wrong", deadline_s=within_s, interval_s=0.3
    )
    return num_live


def what_is_wrong(port: int, outcome: Outcome) -> tuple[list[str], int]:
    """Return what does not belong together in the store, or does not belong there; and the number of live rows."""
    wrong: list[str] = []
    with redis.Redis(port=port, decode_responses=False) as server:
        keys = {key.decode() for key in server.scan_iter(count=1000)}
        found = {key: server.hgetall(key) for key in keys if ":session:" in key}
        rows = {key: row for key, row in found.items() if row}  # a sweep may have taken some meanwhile
        scores = {key: dict(server.zrange(key, 0, -1, withscores=True)) for key in keys if key.endswith(":expiry")}
        tenants = {key: set(server.zrange(key, 0, -1)) for key in keys if ":tenant:" in key}
        lengths = {key: server.llen(key) for key in keys if ":transcript:" in key}
        wrong += [f"for ever: {key}" for key in keys if server.pttl(key) == -1]
        # One ledger, or one a shard in a Cluster.
        ledgers = [ledger_key(TENANT, shard) for shard in (None, *range(NUM_SHARDS))]
        counted = sum(int(server.hget(ledger, "sum") or 0) for ledger in keys.intersection(ledgers))
    live = {key for key, row in rows.items() if row.get(b"state") != b"tombstone"}
    names = {key.rsplit(":", 1)[1] for key in live}
    wrong += [f"{len(live)} sessions count {counted} bytes"] * (counted < len(live) * CONTEXT_BYTES)
    wrong += [f"lost: {name}" for name in sorted(outcome.live - names)]
    wrong += [f"not to be there: {name}" for name in sorted(names - outcome.live - outcome.maybe)]
    needed: set[str] = set(rows)
    for key in live:
        row = rows[key]
        tenant, name = key.rsplit(":", 2)[1:]
        _, transcript, expiry, of_tenant = script_keys(SessionKey(tenant, name))
        needed |= {transcript, expiry, of_tenant}
        due = row[b"lease_until_ms" if row[b"state"] == b"creating" else b"expires_at_ms"]
        if scores.get(expiry, {}).pop(f"{tenant}:{name}".encode(), None) != float(due):
            wrong.append(f"expiry score is not the row's: {key}")
        if name.encode() not in tenants.get(of_tenant, set()):
            wrong.append(f"not in its tenant's set: {key}")
        tenants.get(of_tenant, set()).discard(name.encode())
        shared = [named.split(":") for named in row.get(b"trunks", b"").decode().split()]
        trunks = {transcript.replace(":transcript:", ":trunk:").replace(f":{name}", f":{one[0]}") for one in shared}
        needed |= trunks
        if not trunks <= keys:
            wrong.append(f"without a trunk: {key}")
        if lengths.get(transcript, 0) + sum(int(one[1]) for one in shared) != int(row[b"num_segments"]):
            wrong.append(f"transcript of another length: {key}")
    wrong += [f"an expiry of nothing: {key} {members}" for key, members in scores.items() if members]
    wrong += [f"a tenant's entry of nothing: {key} {members}" for key, members in tenants.items() if members]
    wrong += [
        f"a key of nothing: {key}" for key in sorted(keys - needed - {SWEEPER_KEY}) if not _FREE & set(key.split(":"))
    ]
    return wrong, len(live)
