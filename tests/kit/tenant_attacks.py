"""Calls of one tenant about ids that are not its own: absent, deleted, another's. The three answers must be one.

Each attack is drawn once and sent three times, with nothing changed but the id, so that every difference in status,
headers or body is a leak. Ids have one length; what differs between any two answers (request id, date, timings, times
of expiry) is not looked at.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from contextcache.clock import SystemClock
from contextcache.identity import (
    IDENTITY_HEADER,
    KV_TRANSFER_KEY,
    UNROUTED_HEADER,
    Identity,
    KVTransfer,
    cache_salt,
    sign_identity,
    sign_kv_transfer,
)
from contextcache.names import new_session_id
from gateway.flows import ROUTING_HEADERS
from tests.kit.gateway_parts import SECRET
from tests.kit.tenant_world import SYSTEM_PROMPT, TENANTS, TenantWorld, created, key_of, mark_of
from tests.kit.turn_pod import MODEL

KINDS = ("absent", "deleted", "foreign")
NUM_STALLS_MAX = 5
NUM_FOREIGN = 4
NUM_DELETED = 4
_UNEQUAL_HEADERS = frozenset({"date", "x-request-id", "server-timing", "x-envoy-upstream-service-time"})
_TIMES = re.compile(rb'"(created|expires_at)": ?\d+|req_[0-9a-f]{32}')


@dataclass(frozen=True)
class Attack:
    """One call with a place for the id."""

    name: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    status: int
    """What all three answers must be."""

    def with_id(self, session_id: str) -> Attack:
        def put(value: Any) -> Any:
            if isinstance(value, str):
                return value.replace("{id}", session_id)
            if isinstance(value, dict):
                return {key: put(found) for key, found in value.items()}
            return [put(found) for found in value] if isinstance(value, list) else value

        return Attack(self.name, self.method, put(self.path), put(dict(self.headers)), put(self.body), self.status)


@dataclass
class Tally:
    """What came out."""

    calls: Counter[str] = field(default_factory=Counter)
    """By attack."""
    hits: list[str] = field(default_factory=list)
    """Answers that held something of another tenant."""
    differences: list[str] = field(default_factory=list)
    num_stalls: int = 0
    """Attacks of which an answer was 503: not compared."""

    @property
    def num_calls(self) -> int:
        return sum(self.calls.values())


@dataclass
class Attacker:
    """One tenant, one call at a time, about ids nobody else attacks meanwhile."""

    world: TenantWorld
    tenant: str
    rng: Random
    tally: Tally
    victim: str = ""
    foreign: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    async def prepare(self) -> None:
        """Have a victim make contexts, and make and delete some."""
        self.victim = self.rng.choice([tenant for tenant in TENANTS if tenant != self.tenant])
        self.foreign = [await created(self.world, self.victim) for _ in range(NUM_FOREIGN)]
        for owner in [self.tenant, self.tenant, self.victim, self.victim][:NUM_DELETED]:
            session_id = await created(self.world, owner)
            await self._delete(session_id, owner)
            self.deleted.append(session_id)

    async def run(self, num_attacks: int) -> None:
        for _ in range(num_attacks):
            attack = drawn_attack(self.rng, self.tenant, self.victim, self.foreign[0], decoy=self.world.decoy.port)
            kinds = self.rng.sample(KINDS, k=len(KINDS))
            answers = {kind: await self._answer(attack, self._id(kind, attack)) for kind in kinds}
            if any(status == 503 for status, _, _ in answers.values()) and self.tally.num_stalls < NUM_STALLS_MAX:
                # The machine stood still for longer than a deadline.
                self.tally.num_stalls += 1
                continue
            if len(set(answers.values())) != 1 or answers["absent"][0] != attack.status:
                self.tally.differences.append(f"{self.tenant}: {attack}: {answers}")

    def _id(self, kind: str, attack: Attack) -> str:
        if kind == "absent":
            return new_session_id()
        ids = self.foreign if kind == "foreign" else self.deleted
        # Who deleted a context itself may page on behind it: the last ones are the victim's, and stay so.
        if attack.name == "list after the id":
            return ids[-1]
        return self.rng.choice(ids[:-1] if attack.name == "create under the id" else ids)

    async def _answer(self, template: Attack, session_id: str) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
        attack = template.with_id(session_id)
        data = None if attack.body is None else json.dumps(attack.body).encode()
        headers = {"authorization": f"Bearer {key_of(self.tenant)}", "content-type": "application/json"}
        async with self.world.front.request(
            attack.method, attack.path, data=data, headers=headers | dict(attack.headers)
        ) as answer:
            raw = await answer.read()
            told = sorted((name.lower(), value) for name, value in answer.headers.items())
        self.tally.calls[attack.name] += 1
        everything = raw + str(told).encode()
        for other in TENANTS:
            if other != self.tenant and mark_of(other).encode() in everything:
                self.tally.hits.append(f"{self.tenant} saw {other}: {attack}: {everything!r}")
        if attack.name == "create under the id" and answer.status == 200:
            await self._delete(session_id, self.tenant)
        kept = tuple(
            (name, value.replace(session_id, "{id}"))
            for name, value in told
            if name not in _UNEQUAL_HEADERS and name != "x-context-expires-at"
        )
        return answer.status, kept, _TIMES.sub(b"", raw.replace(session_id.encode(), b"{id}"))

    async def _delete(self, session_id: str, owner: str) -> None:
        headers = {"authorization": f"Bearer {key_of(owner)}"}
        async with self.world.front.request("DELETE", f"/v1/context/{session_id}", headers=headers) as answer:
            assert answer.status == 200, await answer.read()


def drawn_attack(rng: Random, tenant: str, victim: str, victims_id: str, *, decoy: int) -> Attack:
    """Return a random call. `victims_id`: a context of the victim's; `decoy`: a port to be steered to."""
    name = rng.choice(sorted(_ATTACKS))
    method, path, status, body = _ATTACKS[name]
    headers = _forged_headers(rng, victim, victims_id, decoy)
    asked = None
    if body is not None:
        asked = dict(body)
        if "session_id" not in body and not name.startswith("named"):
            return Attack(name, method, path, headers, asked, status)
        asked |= {"model": MODEL, "max_tokens": rng.choice([1, 4])}
        asked |= _prompt(rng, tenant, chat="chat" in path) | _forged_fields(rng, victim, victims_id)
        if path != "/v1/context":
            asked |= rng.choice([{}, {"context_mode": "replay"}, {"context_mode": "append"}, {"context_commit": False}])
        if rng.random() < 0.2:
            asked["stream"] = True
        if name.startswith("turn") and rng.random() < 0.2:
            headers["x-session-id"] = "{id}"
        if name.startswith("turn") and rng.random() < 0.3:
            headers["if-match"] = str(rng.choice([0, 1, 2, 99]))
    if name == "named in the head":
        headers["x-session-id"] = "{id}"
    elif name == "named twice in the head":
        headers["x-session-id"] = "{id}, {id}"
    return Attack(name, method, path, headers, asked, status)


_ATTACKS: dict[str, tuple[str, str, int, dict[str, Any] | None]] = {
    "read": ("GET", "/v1/context/{id}", 404, None),
    "read with a query": ("GET", "/v1/context/{id}?limit=1&after={id}&tenant=red", 400, None),
    "head": ("HEAD", "/v1/context/{id}", 405, None),
    "delete": ("DELETE", "/v1/context/{id}", 404, None),
    "patch": ("PATCH", "/v1/context/{id}", 404, {"ttl": 600}),
    "put": ("PUT", "/v1/context/{id}", 405, {}),
    "post": ("POST", "/v1/context/{id}", 405, {}),
    "fork": ("POST", "/v1/context/{id}/fork", 404, {"generation": 1}),
    "compact": ("POST", "/v1/context/{id}/compact", 404, {}),
    "rewind": ("POST", "/v1/context/{id}/rewind", 404, {"generation": 1}),
    "read a rewind": ("GET", "/v1/context/{id}/rewind", 405, None),
    "read a fork": ("GET", "/v1/context/{id}/fork", 405, None),
    "list after the id": ("GET", "/v1/context?after={id}", 400, None),
    "turn": ("POST", "/v1/completions", 404, {"session_id": "{id}"}),
    "turn in chat": ("POST", "/v1/chat/completions", 404, {"session_id": "{id}"}),
    "turn in messages": ("POST", "/v1/messages", 404, {"session_id": "{id}"}),
    "named in the head": ("POST", "/v1/completions", 404, {}),
    "named twice in the head": ("POST", "/v1/chat/completions", 404, {}),
    "create under the id": ("POST", "/v1/context", 200, {"session_id": "{id}"}),
}
"""Method, path, the one status, and what the body must hold (None: no body). Calls that do not exist yet are here too:
what they answer must not depend on the id either, nor may what they become."""


def _prompt(rng: Random, tenant: str, *, chat: bool) -> dict[str, Any]:
    # The beginning is the victim's too, text and ids; the rest is the attacker's own.
    text = f"{SYSTEM_PROMPT}{mark_of(tenant)} {secrets.token_hex(2)}"
    if chat:
        return {"messages": [{"role": "user", "content": text}]}
    return {"prompt": [ord(one) for one in text] if rng.random() < 0.5 else text}


def _forged_headers(rng: Random, victim: str, victims_id: str, decoy: int) -> dict[str, str]:
    """Return headers of ours that a client has no business to send, some of them genuine: leaked, as it were."""
    later_ms = SystemClock().now_ms() + 60_000
    genuine = sign_identity(Identity(victim, "req_1", later_ms, victims_id), SECRET)
    forged = sign_identity(Identity(victim, "req_1", later_ms, "{id}"), b"another secret of 32 bytes or so")
    address = f"127.0.0.1:{decoy}"
    offered = {
        IDENTITY_HEADER: rng.choice([genuine, forged, "v1.x.y"]),
        UNROUTED_HEADER: "1",
        "x-envoy-original-path": "/v1/context/" + victims_id,
        "x-http-method-override": "GET",
        "x-tenant": victim,
        "x-usage-format": "openai",
        **dict.fromkeys(sorted(ROUTING_HEADERS - {UNROUTED_HEADER}), address),
    }
    return {name: offered[name] for name in rng.sample(sorted(offered), k=rng.randint(0, 4))}


def _forged_fields(rng: Random, victim: str, victims_id: str) -> dict[str, Any]:
    order = KVTransfer(victim, victims_id, "req_1", ("ref_" + "0" * 32,), "ref_" + "1" * 32, 2**50)
    params = {KV_TRANSFER_KEY: sign_kv_transfer(order, SECRET)}
    offered: dict[str, Any] = {
        "cache_salt": "0" * 64,
        "kv_transfer_params": params,
        "vllm_xargs": {"kv_transfer_params": params, "cache_salt": "1" * 64},
        "user": victim,
        "tenant": victim,
        "cache_ref": "ref_" + "0" * 32,
    }
    return {name: offered[name] for name in rng.sample(sorted(offered), k=rng.randint(0, 3))}


async def attack_each_other(world: TenantWorld, *, num_calls: int, seed: int, num_attackers: int = 12) -> Tally:
    """Make so many calls, or a few more, and return what came of them."""
    tally = Tally()
    attackers = [
        Attacker(world, TENANTS[number % len(TENANTS)], Random(f"{seed}/{number}"), tally)
        for number in range(num_attackers)
    ]
    await asyncio.gather(*(attacker.prepare() for attacker in attackers))
    before = await standing(world)
    each = -(-num_calls // (len(KINDS) * num_attackers))
    await asyncio.gather(*(attacker.run(each) for attacker in attackers))
    if await standing(world) != before:
        tally.hits.append("a context, or its KV, is not what it was")
    check_engine(world, tally)
    return tally


def check_engine(world: TenantWorld, tally: Tally) -> None:
    """Hold whatever reached the engine against whose it is."""
    for found in world.engine.generated:
        order = found.order
        owner = None if order is None else order.tenant
        salt = "" if owner is None else cache_salt(owner, MODEL, SECRET)
        if found.salt != salt or (order is None and found.loaded):
            tally.hits.append(f"another's prefix cache: {found}")
        if any((one.tenant, one.session_id) != (owner, order.session_id) for one in found.loaded if order):
            tally.hits.append(f"another's KV: {found}")
        if owner is not None and any(mark_of(other) in found.prompt for other in TENANTS if other != owner):
            tally.hits.append(f"another's text: {found}")
    if world.decoy.received:
        tally.hits.append("a request was steered to a server of the client's choice")


async def standing(world: TenantWorld) -> dict[str, Any]:
    """Return every live context of every tenant as its owner sees it, and the KV there is."""
    found: dict[str, Any] = {"manifests": world.sidecar.manifest_files()}
    for tenant in TENANTS:
        found[tenant] = [await _page_of(world, tenant, after) async for after in _pages(world, tenant)]
    return found


async def _pages(world: TenantWorld, tenant: str):
    after = ""
    while True:
        yield after
        page = await _page_of(world, tenant, after)
        after = page["last_id"]
        if not page["has_more"]:
            return


async def _page_of(world: TenantWorld, tenant: str, after: str) -> Any:
    headers = {"authorization": f"Bearer {key_of(tenant)}"}
    async with world.front.get(f"/v1/context?limit=100&after={after}", headers=headers) as answer:
        assert answer.status == 200
        return await answer.json()
