"""Values survive the wire."""

from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.errors import ContextCacheError, InvalidRequest
from contextcache.model import (
    CacheSessionMetadata,
    KVGroup,
    KVKind,
    Manifest,
    Segment,
    SegmentKind,
    SessionMode,
    SessionState,
    TtlPolicy,
    TurnCommit,
)
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.v1 import kv_sidecar_pb2 as sidecar_pb
from contextcache.wire.messages import message_of, value_of

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
count = st.integers(0, 2**50)
ids = st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple)
int32 = st.integers(0, 2**31 - 1)
groups = st.builds(
    KVGroup,
    kind=st.sampled_from(get_args(KVKind)),
    block_tokens=int32,
    runs=st.lists(st.tuples(int32, int32), max_size=3).map(tuple),
    window=int32,
    digest=text,
)
segments = st.builds(Segment, kind=st.sampled_from(SegmentKind), token_ids=ids, text=text, messages_json=text)


@given(
    st.builds(
        CacheSessionMetadata,
        **dict.fromkeys(("session_id", "tenant", "model_id", "cache_ref", "previous_cache_ref", "holder"), text),
        **dict.fromkeys(("generation", "created_at_ms", "expires_at_ms", "ttl_s", "num_tokens", "num_turns"), count),
        mode=st.sampled_from(SessionMode),
        state=st.sampled_from(SessionState),
        ttl_policy=st.sampled_from(TtlPolicy),
        metadata=st.dictionaries(text, text, max_size=3),
        holders=st.none() | st.lists(text, max_size=3).map(tuple),
    )
)
def test_a_session_survives_the_wire(session):
    assert value_of(CacheSessionMetadata, message_of(pb.Session, session)) == session


@given(
    st.builds(
        TurnCommit,
        **dict.fromkeys(("tenant", "session_id", "lease_id", "cache_ref", "holder"), text),
        expected_generation=count,
        keep_segments=count,
        segments=st.lists(segments, max_size=3).map(tuple),
    )
)
def test_a_commit_survives_the_wire(commit):
    assert value_of(TurnCommit, message_of(pb.TurnCommit, commit)) == commit


@given(
    st.builds(
        Manifest,
        **dict.fromkeys(("cache_ref", "tenant", "session_id", "fingerprint"), text),
        token_ids=ids,
        groups=st.lists(groups, min_size=1, max_size=3).map(tuple),
        files=st.just(()),
        world_size=st.integers(0, 2**31 - 1),
        expires_at_ms=count,
        size_bytes=count,
        block_checksums=st.lists(text, max_size=3).map(tuple),
    )
)
def test_a_manifest_survives_the_wire_but_for_its_files_which_follow(manifest):
    assert value_of(Manifest, message_of(sidecar_pb.Manifest, manifest)) == manifest


@pytest.mark.parametrize("kind", ["", "mla", "STATE"])
def test_a_group_of_a_kind_that_is_not_known_is_refused(kind):
    with pytest.raises(InvalidRequest):
        value_of(KVGroup, sidecar_pb.KVGroup(kind=kind, block_tokens=4))


@pytest.mark.parametrize("field", ["state", "mode", "ttl_policy"])
def test_a_member_of_a_newer_release_is_an_error_of_ours(field):
    """Seen failing with the KeyError of the table: loops and turns catch errors of ours alone."""
    with pytest.raises(ContextCacheError, match=f"Session.{field} is 99: a newer release"):
        value_of(CacheSessionMetadata, pb.Session(tenant="t", session_id="s", **{field: 99}))


def test_a_number_with_a_fraction_survives_the_wire():
    """Seen failing: the sidecar read each question of an engine as a fault."""
    report = sidecar_pb.LoadReport(request_id="r", restore_ms=2.5)

    assert value_of(Told, report) == Told("r", 2.5)


@dataclass(frozen=True)
class Told:
    request_id: str
    restore_ms: float
