"""Parsers on arbitrary bytes: a value or CorruptBlock (InvalidRequest for frames), no memory a file merely asks for.

Seen, each with its check in the parser taken out: AttributeError for a metadata that is a list, UnicodeEncodeError for
half a character, a manifest of `world_size` 10**12 accepted, one of an expiry that no message carries.
"""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contextcache.errors import CorruptBlock, InvalidRequest
from contextcache.model import KVGroup, Manifest
from contextcache.v1 import kv_sidecar_pb2
from contextcache.wire.messages import message_of, value_of
from kv_sidecar.format.block_file import parse_block_file, parse_head
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import (
    MAX_GROUPS,
    all_keys,
    decode_manifest,
    encode_manifest,
    manifest_checksum,
    num_files,
)
from kv_sidecar.format.safetensors_header import TensorHeader, decode_header, encode_header
from kv_sidecar.moving.peer import FrameAssembly
from kv_sidecar.sealed.manifests import record_of
from kv_sidecar.sealed.prefixes import PrefixIndex
from tests.kit.kv_blocks import block_file_bytes, block_meta_of, new_save, planned

PLAN = planned(new_save(tuple(range(10)), now_ms=1, world_size=2), block_tokens=4)
GROUPS = (
    KVGroup("full_attention", 4, ((0, 10),), 0, "a0" * 8),
    KVGroup("sliding_window", 4, ((0, 2), (5, 10)), 5, "b0" * 8),
    KVGroup("state", 4, ((9, 10),), 0, "c0" * 8),
)
HYBRID = planned(new_save(tuple(range(10)), now_ms=1, world_size=2, groups=GROUPS), block_tokens=4)
MANIFEST = encode_manifest(replace(PLAN, block_checksums=("0" * 32,) * 6))
HYBRID_MANIFEST = encode_manifest(replace(HYBRID, block_checksums=("0" * 32,) * (2 * num_files(HYBRID))))
BLOCK = block_file_bytes(block_meta_of())
GROUP_BLOCK = block_file_bytes(replace(block_meta_of(), group="a0" * 8, first_token=7))
MEMORY_BYTES = 64 << 20
"""More than any of these may take; a head of 2**60 bytes would be announced."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "U32", "F64", None, []]) | JSON,
        "shape": st.lists(st.integers(-1, 2**70), max_size=10) | JSON,
        "data_offsets": st.lists(st.integers(-1, 2**70), max_size=3) | JSON,
    },
    optional={"supplement": JSON, "x": JSON},
)
DOCUMENT = st.fixed_dictionaries(
    {"__metadata__": st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3) | JSON},
    optional={"pages": ENTRY | JSON, "token_ids": ENTRY | JSON},
)


def read_manifest(data: bytes) -> None:
    manifest = decode_manifest(data)
    assert len(all_keys(manifest)) == num_files(manifest) * manifest.world_size
    assert num_files(manifest) <= len(manifest.token_ids) * len(manifest.groups)
    assert manifest.world_size <= 1024
    assert len(manifest.groups) <= MAX_GROUPS
    assert value_of(Manifest, message_of(kv_sidecar_pb2.Manifest, manifest)).expires_at_ms == manifest.expires_at_ms
    index = PrefixIndex()
    index.add(manifest.cache_ref, record_of(manifest).at)


def read_block(data: bytes) -> None:
    file = parse_block_file(data)
    file.verify()
    file.close()


def read_block_head(data: bytes) -> None:
    parse_head(memoryview(data))


READERS = pytest.mark.parametrize("read", [read_manifest, read_block, read_block_head])


def is_refused_or_read(read: Callable[[bytes], None], data: bytes) -> None:
    """Read; the only error may be CorruptBlock, and memory stays bounded."""
    tracemalloc.start()
    try:
        with suppress(CorruptBlock):
            read(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MEMORY_BYTES


def with_head(document: Any, tensor: bytes = b"") -> bytes:
    raw = json.dumps(document).encode()
    return len(raw).to_bytes(8, "little") + raw + tensor


@READERS
@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200))
@example((1 << 60).to_bytes(8, "little"))
@example((2**64 - 1).to_bytes(8, "little") + b"{}")
@example(with_head([]))
@example(with_head("text"))
@example(with_head({"__metadata__": [], "pages": {}}))
@example(b"\x10\x27\0\0\0\0\0\0" + b"[" * 10_000)
def test_arbitrary_bytes_are_corrupt(read: Callable[[bytes], None], data: bytes) -> None:
    is_refused_or_read(read, data)


@READERS
@settings(deadline=None, max_examples=80)
@given(DOCUMENT, st.binary(max_size=32))
@example({"__metadata__": {"a": "\ud800"}, "token_ids": {"dtype": "U32", "shape": [0], "data_offsets": [0, 0]}}, b"")
@example({"__metadata__": {}, "pages": {"dtype": "U8", "shape": [0, 2**70, 1], "data_offsets": [0, 0]}}, b"")
@example({"__metadata__": {}, "pages": {"dtype": "U8", "shape": [2**60] * 3, "data_offsets": [0, 2**180]}}, b"")
def test_arbitrary_heads_are_corrupt(read: Callable[[bytes], None], document: Any, tensor: bytes) -> None:
    is_refused_or_read(read, with_head(document, tensor))


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat"]),
        st.floats(0, 1),
        st.integers(0, 255),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=4,
)


WHOLE = [
    pytest.param(read_manifest, MANIFEST, id="manifest"),
    pytest.param(read_manifest, HYBRID_MANIFEST, id="manifest-of-groups"),
    pytest.param(read_block, BLOCK, id="block"),
    pytest.param(read_block, GROUP_BLOCK, id="block-of-group"),
    pytest.param(read_block_head, BLOCK, id="head"),
]


@pytest.mark.parametrize(("read", "whole"), WHOLE)
@settings(deadline=None, max_examples=100)
@given(mutations=MUTATIONS)
def test_mutated_files_are_corrupt_or_mean_the_same(
    read: Callable[[bytes], None], whole: bytes, mutations: list[tuple[str, float, int, bytes]]
) -> None:
    data = bytearray(whole)
    for kind, where, mask, extra in mutations:
        at = int(where * len(data))
        if kind == "flip" and at < len(data):
            data[at] ^= mask
        elif kind == "cut":
            del data[at : at + mask]
        elif kind == "insert":
            data[at:at] = extra
        else:
            data[at:at] = data[at : at + mask]

    is_refused_or_read(read, bytes(data))


NUMBERS = st.integers(-(10**12), 10**12).map(str) | st.sampled_from(["", "x", "٣", "1e3", "1" * 5000, " 1", "1_0"])


def resealed(whole: bytes, changes: dict[str, str]) -> bytes:
    """A manifest that says something else, with a right checksum."""
    header, start = decode_header(memoryview(whole))
    metadata = {**header.metadata, **changes}
    del metadata["checksum"]
    tensor = whole[start:]
    metadata["checksum"] = manifest_checksum(metadata, tensor)
    entry = {"dtype": "U32", "shape": [len(tensor) // 4], "data_offsets": [0, len(tensor)]}
    return with_head({"__metadata__": metadata, "token_ids": entry}, tensor)


@pytest.mark.parametrize("whole", [MANIFEST, HYBRID_MANIFEST], ids=["manifest", "manifest-of-groups"])
@settings(deadline=None, max_examples=150)
@given(numbers=st.dictionaries(st.sampled_from(["block_tokens", "world_size", "expires_at_ms", "size_bytes"]), NUMBERS))
@example(numbers={"world_size": "1000000000000"})
@example(numbers={"block_tokens": "-5"})
@example(numbers={"expires_at_ms": "9" * 20})
@example(numbers={"expires_at_ms": "-1", "size_bytes": "9" * 4000})
@example(numbers={"block_tokens": "0"})
def test_a_manifest_with_a_right_checksum_over_absurd_numbers_is_corrupt_or_bounded(
    whole: bytes, numbers: dict[str, str]
) -> None:
    is_refused_or_read(read_manifest, resealed(whole, numbers))


NUMBER = st.integers(-2, 12) | st.sampled_from([2**31, 2**63, 10**30, 4.0, float("inf"), float("nan"), True, "4"])
GROUP = st.fixed_dictionaries(
    {
        "block_tokens": st.integers(1, 4) | NUMBER | JSON,
        "digest": st.sampled_from(["a0" * 8, "b0" * 8, "", "x"]) | JSON,
        "kind": st.sampled_from(["full_attention", "sliding_window", "state", "x"]) | JSON,
        "runs": st.just([[0, 10]]) | st.lists(st.lists(NUMBER, min_size=2, max_size=2), max_size=5) | JSON,
    },
    optional={"window": NUMBER | JSON, "x": JSON},
)


@settings(deadline=None, max_examples=300)
@given(st.lists(GROUP, max_size=3).map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=30))
@example("[" * 10_000)
@example('[{"block_tokens":Infinity,"digest":"","kind":"full_attention","runs":[[0,10]]}]')
@example("[" + ",".join(["{}"] * 10_000) + "]")
@example('[{"block_tokens":4294967296,"digest":"","kind":"full_attention","runs":[[0,10]]}]')
def test_a_manifest_with_a_right_checksum_over_absurd_groups_is_corrupt_or_bounded(groups: str) -> None:
    is_refused_or_read(read_manifest, resealed(MANIFEST, {"groups": groups}))


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["group", "first_token", "kind", "name", "rank"]),
        NUMBERS | st.sampled_from(["a0" * 8, "block", "tail", "../x"]),
    )
)
def test_a_block_that_says_absurd_things_of_its_group_is_corrupt_or_read(changes: dict[str, str]) -> None:
    header, start = decode_header(memoryview(GROUP_BLOCK))
    changed = TensorHeader(header.tensor, header.dtype, header.shape, {**header.metadata, **changes})

    is_refused_or_read(read_block, encode_header(changed) + GROUP_BLOCK[start:])


@given(
    st.text()
    | st.from_regex(
        r"(ref_)?[0-9a-f]{32,64}(\.[0-9a-f]{16})?(\.[0-9]{1,11})?\.r[0-9]{1,6}\.safetensors", fullmatch=True
    )
)
def test_a_file_name_is_a_key_that_has_this_very_name_or_none(name: str) -> None:
    key = BlockKey.from_file_name(name)

    assert key is None or key.file_name == name


FRAME = st.tuples(st.integers(0, 1), st.binary(max_size=40), st.booleans())


@settings(deadline=None)
@given(st.lists(FRAME, max_size=20))
def test_frames_in_any_order_are_whole_files_or_refused_and_give_their_slot_back(
    frames: list[tuple[int, bytes, bool]],
) -> None:
    async def play() -> None:
        slots, limit = asyncio.Semaphore(1), 64
        try:
            with closing(FrameAssembly(slots, limit_bytes=limit)) as assembly:
                sent = b""
                for index, frame, last in frames:
                    whole = await assembly.add(("ref", 0, index), frame, last=last)
                    sent += frame
                    assert len(sent) <= limit
                    if whole is not None:
                        assert bytes(whole) == sent
                        sent = b""
                        assembly.close()
                assembly.check_finished()
        except InvalidRequest:
            pass
        assert not slots.locked()

    asyncio.run(play())
