"""Messages with absurd fields at every door of a running sidecar: a typed answer or refusal, and it serves on.

Seen failing: with `block_tokens_min` not asked for in `check_groups` (ValueError, answered UNKNOWN).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.clock import SystemClock
from contextcache.names import new_cache_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.rpc import CODE_KEY
from kv_sidecar.format.ids import pack_token_ids
from kv_sidecar.server import serve
from kv_sidecar.tiers.memory import rounded
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import BORROWER, FINGERPRINT, TENANT, SidecarUnderTest, new_save

SERVICE = pb.DESCRIPTOR.services_by_name["KVSidecarService"]
WAITS = {"WaitSealed", "GetLoadReport", "LendSlots"}
"""They may wait as long as they are asked to; the call's own deadline then ends them."""
DEADLINE_S = {True: 0.3, False: 60.0}
TYPED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE,
}
TEXTS = st.sampled_from(
    [
        TENANT,
        "ctx_1",
        "ref_" + "1" * 32,
        "ref_" + "2" * 32,
        FINGERPRINT,
        "",
        ".",
        "..",
        "../../etc/passwd",
        "x\0y",
        "\n",
        "é" * 200,
        "x" * 70_000,
        "{}",
        "[" * 5_000,
        "127.0.0.1:1",
    ]
) | st.text(max_size=20)
SMALL = st.sampled_from([0, 1, 2, 3, 4])
RANGES = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_ENUM: (-1, 99),
}


GOOD = {
    "tenant": TENANT,
    "session_id": "ctx_1",
    "cache_ref": "ref_" + "1" * 32,
    "fingerprint": FINGERPRINT,
    "rank": 0,
    "world_size": 1,
    "expires_at_ms": 2**52,
    "borrower": BORROWER,
}
"""What lets a call get past the first checks; most have most of it."""


def values_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    absurd = absurd_values_of(field)
    good = st.just(GOOD.get(field.name))
    return st.one_of(good, good, good, good, absurd) if field.name in GOOD else absurd


def absurd_values_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return messages(field.message_type)
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXTS
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=300)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return st.floats()
    low, high = RANGES[field.type]
    return SMALL | st.sampled_from([low, high, 2**31 - 1]) | st.integers(low, high)


def messages(descriptor: Any) -> st.SearchStrategy[Any]:
    fields = {
        field.name: st.lists(values_of(field), max_size=6) if field.is_repeated else values_of(field)
        for field in descriptor.fields
    }
    good = {name: fields.pop(name) for name in GOOD.keys() & fields.keys()}
    return st.fixed_dictionaries(good, optional=fields).map(lambda chosen: build(descriptor, chosen))


def build(descriptor: Any, chosen: dict[str, Any]) -> Any:
    oneofs = [{field.name for field in oneof.fields} for oneof in descriptor.oneofs]
    for names in oneofs:
        for extra in sorted(names & chosen.keys())[1:]:
            del chosen[extra]
    return getattr(pb, descriptor.name)(**chosen)


METHODS = {method.name: method for method in SERVICE.methods}
CALLS = st.sampled_from(sorted(METHODS)).flatmap(
    lambda name: st.tuples(st.just(name), st.lists(messages(METHODS[name].input_type), min_size=1, max_size=3))
)


class Doors:
    """A sidecar that runs in a loop of its own thread."""

    def __init__(self, root: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.kv = SidecarUnderTest(root, clock=SystemClock(), peers=("127.0.0.1",), unix_socket=root / "s.sock")
        self.address = f"unix://{root}/s.sock"
        self.run(self.kv.sidecar.open())
        self.server = self.run(self._serve())
        self.channel = grpc.insecure_channel(self.address)

    async def _serve(self) -> Any:
        server = serve(self.kv.sidecar, [self.address])
        await server.start()
        return server

    def run(self, steps: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(steps, self.loop).result(120)

    def call(self, name: str, requests: list[Any], *, waits: bool = False) -> grpc.RpcError | None:
        """Call a method, one that `waits` with a short deadline; return the error it ended with."""
        method = METHODS[name]
        answer_class = getattr(pb, method.output_type.name)
        kind = ("stream" if method.client_streaming else "unary") + ("_stream" if method.server_streaming else "_unary")
        call = getattr(self.channel, kind)(
            f"/{SERVICE.full_name}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer_class.FromString,
        )
        sent = iter(requests) if method.client_streaming else requests[0]
        try:
            answer = call(sent, timeout=DEADLINE_S[waits])
            if method.server_streaming:
                list(answer)
        except grpc.RpcError as exc:
            return exc
        return None

    def close(self) -> None:
        self.channel.close()
        self.run(self.server.stop(1))
        self.run(self.kv.sidecar.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    doors = Doors(tmp_path)
    yield doors
    doors.close()


@pytest.mark.parametrize("max_examples", [150, pytest.param(800, marks=pytest.mark.thorough)])
def test_absurd_fields_are_answered_or_refused_with_a_typed_code(doors: Doors, max_examples: int) -> None:
    @settings(max_examples=max_examples)
    @given(call=CALLS)
    def check(call: tuple[str, list[Any]]) -> None:
        name, requests = call
        error = doors.call(name, requests, waits=name in WAITS)

        if error is None or (name in WAITS and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED):
            return
        assert error.code() in TYPED, (name, error.code(), error.details())
        assert CODE_KEY in dict(error.trailing_metadata()), name

    check()


NUMBERS = st.sampled_from([0, 1, 4, 8, 16, 17]) | st.integers(-(2**31), 2**31 - 1)
GOOD_GROUPS = (
    {"kind": "full_attention", "block_tokens": 4, "window": 0, "runs": [(0, 16)]},
    {"kind": "sliding_window", "block_tokens": 8, "window": 4, "runs": [(0, 4), (6, 16)]},
    {"kind": "state", "block_tokens": 4, "window": 0, "runs": [(15, 16)]},
)
ABSURD: dict[str, st.SearchStrategy[Any]] = {
    "kind": st.sampled_from(["full_attention", "sliding_window", "state"]) | TEXTS,
    "digest": st.sampled_from(["", "a0" * 8]) | TEXTS,
    "block_tokens": NUMBERS,
    "window": NUMBERS,
    "runs": st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6),
}


@st.composite
def some_groups(draw: st.DrawFn) -> list[Any]:
    """Groups that could be, with a thing or two in them that could not."""
    groups = []
    for number in range(draw(st.integers(1, 3) | st.integers(60, 70))):
        fields = {**GOOD_GROUPS[number % len(GOOD_GROUPS)], "digest": f"{number:016x}"}
        if number < 3:
            for name in draw(st.lists(st.sampled_from(sorted(ABSURD)), max_size=1)):
                fields[name] = draw(ABSURD[name])
        runs = [pb.TokenRun(first_token=first, end_token=end) for first, end in fields.pop("runs")]
        groups.append(pb.KVGroup(runs=runs, **fields))
    return groups


def test_absurd_groups_are_prepared_or_refused_with_a_typed_code(doors: Doors) -> None:
    prepared: list[bool] = []

    @settings(max_examples=300)
    @given(groups=some_groups())
    def check(groups: list[Any]) -> None:
        good = {name: GOOD[name] for name in ("tenant", "session_id", "fingerprint", "rank", "world_size")}
        request = pb.PrepareSaveRequest(
            **good, cache_ref=new_cache_ref(), expires_at_ms=2**52, token_ids=pack_token_ids(range(16)), groups=groups
        )
        error = doors.call("PrepareSave", [request])

        prepared.append(error is None)
        if error is not None:
            assert error.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}, (
                groups,
                error.code(),
                error.details(),
            )
            assert CODE_KEY in dict(error.trailing_metadata())

    check()
    assert any(prepared)
    assert not all(prepared)


SIZES = st.sampled_from([1, 64, 700, 1 << 20, (1 << 20) + 1, 1 << 40]) | NUMBERS
PLACES = st.integers(0, 3) | NUMBERS
LOANS = st.fixed_dictionaries(
    {"borrower": st.just(BORROWER) | TEXTS, "timeout_ms": st.integers(-1, 2)},
    optional={"rank": st.integers(0, 1)},
)


def test_absurd_loans_are_made_or_refused_with_a_typed_code_and_none_is_lost(doors: Doors) -> None:
    rank = EngineRank(doors.address)
    new = new_save(tuple(range(16)), now_ms=SystemClock().now_ms())
    rank.prepare(new)
    memory, outcomes = doors.kv.memory, set()

    @settings(max_examples=200)
    @given(
        loan=LOANS,
        files=st.lists(st.tuples(PLACES, SIZES), max_size=4) | st.lists(st.tuples(st.integers(0, 3), st.just(700))),
        returned=st.none() | st.lists(st.integers(-1, 9), max_size=4),
    )
    def check(loan: dict[str, Any], files: list[tuple[int, int]], returned: list[int] | None) -> None:
        asked = {"block_indices": [index for index, _ in files], "sizes_bytes": [size for _, size in files]}
        error = doors.call("LendSlots", [pb.LendSlotsRequest(**loan, **asked, cache_ref=new.cache_ref)])
        if returned is not None:
            newest = memory._last_id
            slot_ids = [newest - number for number in returned]
            assert doors.call("ReturnSlots", [pb.ReturnSlotsRequest(borrower=BORROWER, slot_ids=slot_ids)]) is None

        outcomes.add(error if error is None else error.code())
        assert error is None or CODE_KEY in dict(error.trailing_metadata())
        assert memory.lent_bytes <= memory.limit_bytes // 2 or len(memory._lent) == 1
        assert doors.kv.missing_bytes() == sum(rounded(lent.slot.size_bytes) for lent in memory._lent.values())

    check()
    rank.close()
    assert outcomes == {None, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
    doors.kv.memory.end_borrower(BORROWER)
    assert doors.kv.missing_bytes() == memory.lent_bytes == 0


def test_after_all_of_it_a_context_is_saved_and_loaded_and_nothing_is_left(doors: Doors) -> None:
    @settings(max_examples=60, database=None)
    @given(call=CALLS)
    def knock(call: tuple[str, list[Any]]) -> None:
        name, requests = call
        doors.call(name, requests, waits=name in WAITS)

    knock()
    rank = EngineRank(doors.address)
    new = rank.save(tuple(range(10)), session_id="ctx_after")

    assert rank.load(new)
    rank.close()
    assert doors.kv.has_leases is False
