"""What one tenant can find out about another: nothing, by any call, through any door.

Absent, deleted and foreign ids get one answer, byte for byte. Seen failing, each with its guard taken out: the tenant
out of the session's Redis key, out of the sidecar's look-up by ref and out of the block id; the identity header not
removed by the gateway; the forbidden keys not removed from bodies; one `cache_salt` for all; a message of the manager's
instead of the gateway's own.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from random import Random

import grpc.aio
import pytest

from contextcache.identity import cache_salt
from contextcache.names import new_cache_ref, new_session_id
from contextcache.v1 import context_manager_pb2 as manager_pb
from contextcache.v1 import context_manager_pb2_grpc as manager_grpc
from contextcache.v1 import kv_sidecar_pb2 as sidecar_pb
from contextcache.v1 import kv_sidecar_pb2_grpc as sidecar_grpc
from tests.kit.gateway_parts import SECRET
from tests.kit.kv_blocks import BLOCK_TOKENS, FINGERPRINT
from tests.kit.seed import SEED, random_of
from tests.kit.tenant_attacks import KINDS, attack_each_other, standing
from tests.kit.tenant_world import SYSTEM_PROMPT, created, key_of, running_tenants
from tests.kit.turn_pod import MODEL

NUM_CALLS = {"quick": 300, "thorough": 1200}
"""By front; `tests.torture` makes more than 10 000."""
NUM_ROUNDS = 60
"""Times each gRPC method is called about each kind of id."""
DEADLINE_S = 30


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("front", "num_calls"),
    [
        ("envoy", NUM_CALLS["quick"]),
        pytest.param("envoy", NUM_CALLS["thorough"], marks=pytest.mark.thorough),
        pytest.param("http", NUM_CALLS["thorough"], marks=pytest.mark.thorough),
    ],
)
async def test_no_call_tells_one_tenant_anything_of_another(front: str, num_calls: int, tmp_path: Path) -> None:
    async with running_tenants(tmp_path, front=front) as world:
        tally = await attack_each_other(world, num_calls=num_calls, seed=SEED)

    assert tally.hits == []
    assert tally.differences == []
    assert tally.num_calls >= num_calls
    assert min(tally.calls.values()) >= num_calls // 100, tally.calls


@pytest.mark.timeout(120)
async def test_equal_prompts_of_two_tenants_share_no_block_and_no_salt(tmp_path: Path) -> None:
    prompt = SYSTEM_PROMPT * 3
    async with running_tenants(tmp_path) as world:
        sizes = [world.sidecar.disk_bytes()]
        for tenant in ("red", "red", "green"):
            await created(world, tenant, prompt=prompt)
            sizes.append(world.sidecar.disk_bytes())
        orders = [found.order for found in world.engine.generated]
        manifests = [await world.sidecar.catalog.open(order.tenant, order.save) for order in orders if order]
        blocks = [{file.name for file in manifest.files if file.kind == "block"} for manifest in manifests]
        salts = [found.salt for found in world.engine.generated]
    first, again, other = (after - before for before, after in pairwise(sizes))

    assert len(blocks[0]) > len(prompt) // BLOCK_TOKENS
    assert blocks[0] == blocks[1]
    assert blocks[0].isdisjoint(blocks[2])
    # A tail is never shared; beside it a tenant's own second context costs nothing, another tenant's all of it.
    assert again < first // 4
    assert other == pytest.approx(first, rel=0.01)  # names of different length
    assert salts == [cache_salt(tenant, MODEL, SECRET) for tenant in ("red", "red", "green")]
    assert len(set(salts)) == 2


async def test_a_tenant_that_names_anothers_kv_in_its_own_turn_loads_its_own(tmp_path: Path) -> None:
    """The control: what a tenant saved is found again, so that nothing found of others means something."""
    async with running_tenants(tmp_path) as world:
        mine = await created(world, "red")
        await created(world, "green")
        body = {"model": MODEL, "prompt": "x", "session_id": mine, "kv_transfer_params": {"context_cache": "v1.a.b"}}
        async with world.front.post(
            "/v1/completions", body, headers={"authorization": f"Bearer {key_of('red')}"}
        ) as answer:
            assert answer.status == 200
        last = world.engine.generated[-1]

    assert [(found.tenant, found.session_id) for found in last.loaded] == [("red", mine)]


@pytest.mark.timeout(120)
async def test_a_tenant_over_its_quota_of_kv_is_429_until_it_deletes_and_others_are_not(tmp_path: Path) -> None:
    """By the real sidecar's count. Seen failing without `check_quota` in the pod: 200, and contexts without KV."""
    async with running_tenants(tmp_path, tenant_limit_bytes=150_000) as world:
        mine, refused = [], None
        red = {"authorization": f"Bearer {key_of('red')}"}
        for number in range(100):
            body = {"model": MODEL, "prompt": f"{number} " * 10, "max_tokens": 4}
            async with world.front.post("/v1/context", body, headers=red) as answer:
                found = await answer.json()
                if answer.status != 200:
                    refused = answer.status, found["error"]["code"]
                    break
                mine.append(found["session_id"])
        contexts = await standing(world)
        await created(world, "green")
        async with world.front.post("/v1/completions", {**body, "session_id": mine[0]}, headers=red) as answer:
            turn = answer.status
        for session_id in mine:
            async with world.front.request("DELETE", f"/v1/context/{session_id}", headers=red) as answer:
                assert answer.status == 200
        after = await created(world, "red")

    assert refused == (429, "context_quota_exceeded")
    assert 5 < len(mine) < 100
    assert len(contexts["red"][0]["data"]) == len(mine)
    assert turn == 200
    assert after


class Door:
    """A raw gRPC door: what a call answers, to the last byte."""

    def __init__(self, channel: grpc.aio.Channel, stub: type) -> None:
        self._stub = stub(channel)

    async def ask(self, method: str, request) -> object:
        call = getattr(self._stub, method)(request, timeout=DEADLINE_S)
        try:
            if method == "LoadBlocks":
                return [message.SerializeToString() async for message in call]
            return (await call).SerializeToString(deterministic=True)
        except grpc.aio.AioRpcError as exc:
            return exc.code(), exc.details(), tuple(exc.trailing_metadata() or ())


def manager_calls(rng: Random, tenant: str, session_id: str):
    commit = manager_pb.TurnCommit(
        tenant=tenant, session_id=session_id, lease_id="l", expected_generation=rng.choice([0, 1, 2]), holder="pod-a"
    )
    first = manager_pb.TurnCommit(tenant=tenant, session_id=session_id, lease_id="l", holder="pod-a")
    named = {"tenant": tenant, "session_id": session_id}
    lease = {"lease_id": "l", "lease_ttl_ms": 1000}
    held = manager_pb.HeldCacheRef(**named, cache_ref=new_cache_ref())
    yield "LocateSession", manager_pb.LocateSessionRequest(**named)
    yield "GetSessionMetadata", manager_pb.GetSessionMetadataRequest(**named)
    yield "BeginTurn", manager_pb.BeginTurnRequest(**named, **lease, read_only=rng.random() < 0.5)
    yield "BeginTurn", manager_pb.BeginTurnRequest(**named, **lease, expected_generation=rng.choice([0, 1, 99]))
    yield "RenewLease", manager_pb.RenewLeaseRequest(**named, **lease)
    yield "CommitTurn", manager_pb.CommitTurnRequest(commit=commit)
    yield "RegisterSessionCache", manager_pb.RegisterSessionCacheRequest(commit=first)
    yield "AbortTurn", manager_pb.AbortTurnRequest(**named, lease_id="l")
    yield "NoteHolder", manager_pb.NoteHolderRequest(**named, holder="pod-9")
    yield "TouchSession", manager_pb.TouchSessionRequest(**named, ttl_s=600)
    yield "UnregisterSessionCache", manager_pb.UnregisterSessionCacheRequest(**named)
    yield "ListSessions", manager_pb.ListSessionsRequest(tenant=tenant, limit=10, after=session_id)
    yield "CheckCacheRefs", manager_pb.CheckCacheRefsRequest(held=[held])


def sidecar_calls(rng: Random, tenant: str, session_id: str, cache_ref: str):
    named = {"tenant": tenant, "cache_ref": cache_ref}
    yield "GetManifest", sidecar_pb.GetManifestRequest(**named)
    yield "WaitSealed", sidecar_pb.WaitSealedRequest(**named, timeout_ms=0)
    yield (
        "LoadBlocks",
        sidecar_pb.LoadBlocksRequest(**named, fingerprint=FINGERPRINT, block_indices=[rng.randint(0, 3)]),
    )
    yield "InterruptSave", sidecar_pb.InterruptSaveRequest(**named)
    yield "TouchContext", sidecar_pb.TouchContextRequest(tenant=tenant, session_id=session_id, expires_at_ms=2**45)
    yield "DeleteContext", sidecar_pb.DeleteContextRequest(tenant=tenant, session_id=session_id, cache_refs=[cache_ref])
    yield "PullContext", sidecar_pb.PullContextRequest(tenant=tenant, cache_refs=[cache_ref], peer="127.0.0.1:1")


@pytest.mark.timeout(120)
async def test_manager_and_sidecar_answer_alike_for_absent_deleted_and_foreign_ids(tmp_path: Path) -> None:
    rng = random_of("ids of nobody")
    async with running_tenants(tmp_path) as world:
        ids, refs = {}, {}
        for kind, owner in (("foreign", "green"), ("deleted", "red"), ("absent", "")):
            ids[kind] = await created(world, owner) if owner else new_session_id()
            order = world.engine.generated[-1].order
            refs[kind] = order.save if owner and order else new_cache_ref()
        async with world.front.request(
            "DELETE", f"/v1/context/{ids['deleted']}", headers={"authorization": f"Bearer {key_of('red')}"}
        ) as answer:
            assert answer.status == 200
        async with (
            grpc.aio.insecure_channel(world.manager_address) as manager,
            grpc.aio.insecure_channel(world.sidecar_address) as sidecar,
        ):
            doors = {
                "manager": Door(manager, manager_grpc.ContextManagerServiceStub),
                "sidecar": Door(sidecar, sidecar_grpc.KVSidecarServiceStub),
            }
            answers: dict[tuple[str, int], set] = {}
            num_calls = 0
            for _ in range(NUM_ROUNDS):
                seed = rng.random()
                for kind in rng.sample(KINDS, k=len(KINDS)):
                    calls = [("manager", *one) for one in manager_calls(Random(seed), "red", ids[kind])]
                    calls += [("sidecar", *one) for one in sidecar_calls(Random(seed), "red", ids[kind], refs[kind])]
                    found = await asyncio.gather(*(doors[door].ask(method, request) for door, method, request in calls))
                    num_calls += len(calls)
                    for number, ((door, method, _), one) in enumerate(zip(calls, found, strict=True)):
                        if (method, kind) == ("ListSessions", "deleted"):
                            continue  # its own: red may page on behind it
                        answers.setdefault((f"{door} {method}", number), set()).add(repr(one))
            standing = await doors["manager"].ask(
                "LocateSession", manager_pb.LocateSessionRequest(tenant="green", session_id=ids["foreign"])
            )
            kept = await doors["sidecar"].ask(
                "GetManifest", sidecar_pb.GetManifestRequest(tenant="green", cache_ref=refs["foreign"])
            )

    assert {name: found for (name, _), found in answers.items() if len(found) != 1} == {}
    assert isinstance(standing, bytes)
    assert isinstance(kept, bytes)
    assert num_calls >= 3000
