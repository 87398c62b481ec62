"""Values survive the wire."""

from hypothesis import given
from hypothesis import strategies as st

from contextcache.convert import (
    commit_from_pb,
    commit_to_pb,
    manifest_from_pb,
    manifest_to_pb,
    session_from_pb,
    session_to_pb,
)
from contextcache.model import (
    CacheSessionMetadata,
    Manifest,
    Segment,
    SegmentKind,
    SessionMode,
    SessionState,
    TtlPolicy,
    TurnCommit,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
count = st.integers(0, 2**50)
ids = st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple)
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
    assert session_from_pb(session_to_pb(session)) == session


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
    assert commit_from_pb(commit_to_pb(commit)) == commit


@given(
    st.builds(
        Manifest,
        **dict.fromkeys(("cache_ref", "tenant", "session_id", "fingerprint"), text),
        token_ids=ids,
        block_tokens=st.integers(0, 2**31 - 1),
        block_ids=st.lists(text, max_size=3).map(tuple),
        tail_tokens=st.integers(0, 2**31 - 1),
        world_size=st.integers(0, 2**31 - 1),
        expires_at_ms=count,
        size_bytes=count,
    )
)
def test_a_manifest_survives_the_wire(manifest):
    assert manifest_from_pb(manifest_to_pb(manifest)) == manifest
