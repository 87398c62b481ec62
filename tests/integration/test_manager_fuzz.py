"""A running manager is sent messages that no part of ours would send: typed refusals, and nothing stored by them."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import redis
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contextcache.errors import ERRORS_BY_CODE
from contextcache.model import MAX_TTL_S
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.v1 import context_manager_pb2_grpc as pb_grpc
from contextcache.wire.rpc import CODE_KEY, DETAIL_KEY
from tests.kit.manager_process import ManagerProcess
from tests.kit.valkey import ValkeyServer

KEY = re.compile(
    r"cc:bytes:[\w.-]{1,64}|cc:\{s\d+\}:(expiry|(tenant|answers|bytes):[\w.-]{1,64}|(session|transcript|place|trunk):[\w.-]{1,64}:[\w.-]{1,128}"
    r"|answer:[\w.-]{1,64}:[\w.-]{1,128}:[0-9a-f]{32}|usage:[\w.-]{1,64}:\d{1,5}|counted:[\w.-]{1,64}:[ -~]{1,128})",
    re.ASCII,
)
METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["ContextManagerService"].methods}
REF = "ref_" + "0" * 32
REPEATABLE = {"key": "a" * 32, "request": "b" * 32}
TEXTS = st.one_of(
    # What passes the patterns, so that calls get further than the first check.
    st.sampled_from(["demo", "ctx_1", "ctx_2", "turn", "create", REF, "smol", "{}"]),
    st.sampled_from(["", ":", "*", "cc:{s1}", "a:b", "..", "\x00", "\n", "ref_0", "é" * 64, "a" * 129, "x" * 70_000]),
    st.text(max_size=20),
)
NUMBERS = st.one_of(st.sampled_from([0, 1, 2, 60, 600, 30_000]), st.integers(-(2**63), 2**63 - 1))
SCALARS = {
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=20) | st.just(bytes(257 << 10)),
    FieldDescriptor.TYPE_INT64: NUMBERS,
    FieldDescriptor.TYPE_INT32: st.sampled_from([0, 1, 100]) | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 3) | st.integers(-(2**31), 2**31 - 1),
}


@st.composite
def filled(draw: st.DrawFn, descriptor: Descriptor, only: str = "") -> dict[str, Any]:
    """Return a message's fields, or `only` one: any values of their types."""
    fields: dict[str, Any] = {}
    for field in descriptor.fields:
        if field.name != only if only else draw(st.integers(0, 9)) == 0:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values = SCALARS[field.message_type.fields_by_name["value"].type]
            fields[field.name] = draw(st.dictionaries(TEXTS, values, max_size=20))
            continue
        one = SCALARS[field.type] if field.message_type is None else filled(field.message_type)
        fields[field.name] = draw(st.lists(one, max_size=3) if field.is_repeated else one)
    return fields


NAMED: dict[str, Any] = {"tenant": "demo", "session_id": "ctx_1"}
COMMIT: dict[str, Any] = {
    "tenant": "demo",
    "session_id": "ctx_2",
    "lease_id": "turn",
    "expected_generation": 1,
    "keep_segments": 1,
    "segments": [{"kind": 1, "text": "hi", "token_ids": [1, 2]}],
    "cache_ref": REF,
    "holder": "pod",
}
USAGE = {"key": "app", "counts": {"turns": 1, "computed_tokens": 12}}
LEASE = {"lease_id": "turn", "lease_ttl_ms": 30_000}
VALID: dict[str, dict[str, Any]] = {
    "ReserveSession": {"tenant": "demo", "session_id": "ctx_4", "model_id": "smol", "ttl_s": 600, **LEASE},
    "RegisterSessionCache": {
        "commit": COMMIT | {"session_id": "ctx_3", "lease_id": "create", "expected_generation": 0, "keep_segments": 0}
    },
    "LocateSession": NAMED,
    "GetSessionMetadata": NAMED,
    "BeginTurn": NAMED | LEASE | {"repeatable": REPEATABLE},
    "RenewLease": {"tenant": "demo", "session_id": "ctx_2", **LEASE},
    "CommitTurn": {"commit": COMMIT | {"repeatable": REPEATABLE, "answer": b"kept", "usage": USAGE}},
    "RewindSession": NAMED | {"generation": 1},
    "ForkSession": {
        "source_id": "ctx_1",
        "commit": COMMIT
        | {
            "session_id": "ctx_3",
            "lease_id": "create",
            "expected_generation": 0,
            "keep_segments": 0,
            "segments": [],
        },
    },
    "GetAnswer": NAMED | {"key": "a" * 32},
    "AbortTurn": {"tenant": "demo", "session_id": "ctx_2", "lease_id": "turn"},
    "NoteHolder": {"tenant": "demo", "session_id": "ctx_2", "holder": "pod-9"},
    "TouchSession": NAMED | {"ttl_s": 600, "metadata": {"entries": {"a": "b"}}},
    "UnregisterSessionCache": NAMED,
    "CheckCacheRefs": {"held": [NAMED | {"cache_ref": REF}]},
    "ListSessions": {"tenant": "demo", "limit": 10},
    "AddUsage": {"tenant": "demo", "batch_id": "batch", "usage": [USAGE], "sender": "me", "number": 1},
    "GetUsage": {"tenant": "demo", "first_day": 19_000, "last_day": 19_030},
}
"""A call of each kind that is taken, over what `prepared` leaves."""


@st.composite
def nearly_valid(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Return a valid message with one or two fields, however deep, of any value of their types."""
    message = copy.deepcopy(VALID[name])
    for _ in range(draw(st.integers(1, 2))):
        descriptor, inner = METHODS[name].input_type, message
        while True:
            field = draw(st.sampled_from(list(descriptor.fields)))
            held = inner.get(field.name)
            deeper = field.message_type is not None and not field.message_type.GetOptions().map_entry
            if deeper and held and draw(st.booleans()):
                descriptor, inner = field.message_type, held[0] if isinstance(held, list) else held
                continue
            inner |= draw(filled(descriptor, only=field.name))
            break
    return message


CALLS = st.sampled_from(sorted(METHODS)).flatmap(
    lambda name: st.tuples(st.just(name), nearly_valid(name) | nearly_valid(name) | filled(METHODS[name].input_type))
)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def manager(valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    environment = {"MANAGER_SWEEP_INTERVAL_S": "3600", "MANAGER_REDIS_TIMEOUT_S": "30"}
    manager = ManagerProcess(tmp_path_factory.mktemp("manager"), valkey.url, environment=environment)
    asyncio.run(manager.start())
    yield manager
    asyncio.run(manager.stop())


@pytest.fixture
def stub(manager: ManagerProcess) -> Iterator[Any]:
    with grpc.insecure_channel(manager.address) as channel:
        yield pb_grpc.ContextManagerServiceStub(channel)


def sent(stub: Any, name: str, message: Message) -> grpc.RpcError | None:
    try:
        getattr(stub, name)(message, timeout=60)
    except grpc.RpcError as exc:
        return exc
    return None


def everything(valkey: ValkeyServer) -> dict[bytes, bytes | None]:
    with redis.Redis(port=valkey.port) as server:
        return {key: server.dump(key) for key in server.scan_iter(count=1000)}


def check_rows(valkey: ValkeyServer) -> None:
    """What was taken in is within the limits, and no key is of another shape than ours."""
    with redis.Redis(port=valkey.port, decode_responses=True) as server:
        for key in server.scan_iter(count=1000):
            assert KEY.fullmatch(key), key
            if ":session:" not in key:
                continue
            row = server.hgetall(key)
            assert 1 <= int(row["ttl_s"]) <= MAX_TTL_S, row
            assert int(row["lease_until_ms"]) < (time.time() + 3700) * 1000, row
            assert int(row["lease_until_ms"]) >= 0, row
            assert len(json.loads(row["metadata"])) <= 16, row
            assert len(row["holder"]) <= 256, row


def prepared(stub: Any, valkey: ValkeyServer) -> None:
    """One session that is ready, one with a turn in flight, one being created."""
    valkey.command("FLUSHALL")
    for name in ("ctx_1", "ctx_2", "ctx_3"):
        reserve = pb.ReserveSessionRequest(
            tenant="demo", session_id=name, model_id="smol", ttl_s=600, lease_id="create", lease_ttl_ms=600_000
        )
        assert sent(stub, "ReserveSession", reserve) is None
    for name in ("ctx_1", "ctx_2"):
        commit = pb.TurnCommit(tenant="demo", session_id=name, lease_id="create", segments=[pb.Segment(text="hi")])
        assert sent(stub, "RegisterSessionCache", pb.RegisterSessionCacheRequest(commit=commit)) is None
    begin = pb.BeginTurnRequest(tenant="demo", session_id="ctx_2", lease_id="turn", lease_ttl_ms=600_000)
    assert sent(stub, "BeginTurn", begin) is None


@pytest.mark.thorough
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(call=CALLS)
def test_a_message_with_any_fields_gets_a_typed_answer_and_a_refused_one_stores_nothing(
    stub: Any, valkey: ValkeyServer, call: tuple[str, dict[str, Any]]
) -> None:
    """Seen to fail without the pattern of session ids in limits.py."""
    name, fields = call
    message = METHODS[name].input_type._concrete_class(**fields)
    prepared(stub, valkey)
    before = everything(valkey)
    refused = sent(stub, name, message)
    if refused is None:
        check_rows(valkey)
        return
    metadata = dict(refused.trailing_metadata() or ())

    told = f"{name}: {refused.code()} {refused.details()}"
    assert metadata.get(CODE_KEY) in ERRORS_BY_CODE, told
    assert DETAIL_KEY in metadata, told
    assert refused.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE), told
    assert everything(valkey) == before, told


@pytest.mark.parametrize("name", VALID)
def test_the_calls_that_are_made_worse_are_good_ones(stub: Any, valkey: ValkeyServer, name: str) -> None:
    prepared(stub, valkey)

    assert set(VALID) == set(METHODS)
    assert sent(stub, name, METHODS[name].input_type._concrete_class(**VALID[name])) is None
    check_rows(valkey)


def test_more_than_a_call_may_name_is_refused_and_the_manager_serves_on(stub: Any, valkey: ValkeyServer) -> None:
    prepared(stub, valkey)
    before = everything(valkey)
    held = pb.HeldCacheRef(tenant="demo", session_id="ctx_1", cache_ref=REF)
    many = pb.TurnCommit(
        tenant="demo", session_id="ctx_2", lease_id="turn", expected_generation=1, segments=[pb.Segment()] * 1001
    )
    for name, message in (
        ("CheckCacheRefs", pb.CheckCacheRefsRequest(held=[held] * 501)),
        ("CommitTurn", pb.CommitTurnRequest(commit=many)),
    ):
        refused = sent(stub, name, message)
        assert refused is not None
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sent(stub, "CheckCacheRefs", pb.CheckCacheRefsRequest(held=[held] * 500)) is None
    assert everything(valkey) == before
