"""Bytes as parts of before this release wrote them: they are read as they were meant.

recorded_wire.json holds every message with every field set, each call's shapes, and one of each thing that is stored.
From the first tag on, tests/upgrade holds the protocols to those of a release; what is stored stays here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf import json_format

from context_manager.segments import unpack_segment
from contextcache.errors import InvalidRequest
from contextcache.model import Manifest, SegmentKind, plain_group
from contextcache.v1 import context_manager_pb2, kv_sidecar_pb2
from contextcache.wire.messages import value_of
from kv_sidecar.format.block_file import parse_block_file
from kv_sidecar.format.manifest import block_meta, decode_manifest, encode_manifest, with_files

RECORDED = json.loads(Path(__file__).with_name("recorded_wire.json").read_text())
STORED = {name: bytes.fromhex(text) for name, text in RECORDED["stored"].items()}
TOKENS = (1, 2, 3, 4, 70_000)


def message_class(name):
    for module in (context_manager_pb2, kv_sidecar_pb2):
        if (found := getattr(module, name.rpartition(".")[2], None)) is not None:
            return found
    raise AssertionError(f"{name} is gone")


@pytest.mark.parametrize("name", RECORDED["messages"])
def test_a_message_of_before_means_what_it_meant(name):
    """Seen failing: with the number of a field changed (as another one's bytes)."""
    recorded = RECORDED["messages"][name]

    read = message_class(name).FromString(bytes.fromhex(recorded["bytes"]))

    assert json_format.MessageToDict(read, preserving_proto_field_name=True) == recorded["means"]


def test_a_manifest_on_the_wire_without_groups_is_refused():
    message = kv_sidecar_pb2.Manifest(cache_ref="ref_1", token_ids=TOKENS, world_size=1)

    with pytest.raises(InvalidRequest):
        with_files(value_of(Manifest, message))


def test_every_call_of_before_is_there_with_its_shapes():
    calls = {
        f"/{service.full_name}/{method.name}": [
            method.input_type.name,
            method.output_type.name,
            method.client_streaming,
            method.server_streaming,
        ]
        for file in (context_manager_pb2.DESCRIPTOR, kv_sidecar_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }

    assert RECORDED["calls"].items() <= calls.items()


def test_a_segment_in_redis_of_before_is_read():
    segment = unpack_segment(STORED["segment"])

    assert (segment.kind, segment.num_tokens, segment.text) == (SegmentKind.PROMPT, len(TOKENS), "Grüße")


def test_a_block_of_the_first_release_is_read_under_its_manifest():
    manifest = decode_manifest(STORED["manifest"])
    block = parse_block_file(STORED["block"])

    block.verify(block_meta(manifest, 0, 0), vouched=manifest.block_checksums[0])

    assert (manifest.token_ids, len(manifest.block_checksums)) == (TOKENS, 2)
    assert encode_manifest(manifest) == STORED["manifest"]
    assert manifest.groups == (plain_group(len(TOKENS), 4),)
    assert [(file.kind, file.first_token, file.end_token) for file in manifest.files] == [
        ("block", 0, 4),
        ("tail", 4, 5),
    ]
    assert (block.pages == 7).all()
