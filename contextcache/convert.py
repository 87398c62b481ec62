"""Model values to protobuf messages and back: the only file that knows both shapes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from contextcache.model import (
    CacheSessionMetadata,
    HeldCacheRef,
    KeptGroup,
    KeptMiss,
    KVGroup,
    Manifest,
    NewSession,
    Repeatable,
    Segment,
    SegmentKind,
    SessionId,
    SessionMode,
    SessionState,
    TenantId,
    TtlPolicy,
    TurnCommit,
    TurnReceipt,
    Usage,
    kv_kind,
    plain_group,
)
from contextcache.terms import Terms
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.v1 import kv_sidecar_pb2 as sidecar_pb

_STATE_TO_PB = {
    SessionState.CREATING: pb.SESSION_STATE_CREATING,
    SessionState.READY: pb.SESSION_STATE_READY,
    SessionState.BUSY: pb.SESSION_STATE_BUSY,
}
_STATE_FROM_PB = {number: state for state, number in _STATE_TO_PB.items()}
_MODE_TO_PB = {SessionMode.SESSION: pb.SESSION_MODE_SESSION, SessionMode.PREFIX: pb.SESSION_MODE_PREFIX}
_POLICY_TO_PB = {TtlPolicy.FIXED: pb.TTL_POLICY_FIXED, TtlPolicy.SLIDING: pb.TTL_POLICY_SLIDING}
_KIND_TO_PB = {SegmentKind.PROMPT: pb.SEGMENT_KIND_PROMPT, SegmentKind.ANSWER: pb.SEGMENT_KIND_ANSWER}


def mode_to_pb(mode: SessionMode) -> pb.SessionMode.ValueType:
    """Return the enum number of a mode."""
    return _MODE_TO_PB[mode]


def mode_from_pb(number: pb.SessionMode.ValueType) -> SessionMode:
    """Return the mode; unspecified reads as session."""
    return SessionMode.PREFIX if number == pb.SESSION_MODE_PREFIX else SessionMode.SESSION


def policy_to_pb(policy: TtlPolicy) -> pb.TtlPolicy.ValueType:
    """Return the enum number of a TTL policy."""
    return _POLICY_TO_PB[policy]


def policy_from_pb(number: pb.TtlPolicy.ValueType) -> TtlPolicy:
    """Return the TTL policy; unspecified reads as fixed."""
    return TtlPolicy.SLIDING if number == pb.TTL_POLICY_SLIDING else TtlPolicy.FIXED


def session_to_pb(session: CacheSessionMetadata) -> pb.Session:
    """Return the message of a row."""
    return pb.Session(
        session_id=session.session_id,
        tenant=session.tenant,
        model_id=session.model_id,
        mode=_MODE_TO_PB[session.mode],
        state=_STATE_TO_PB[session.state],
        generation=session.generation,
        cache_ref=session.cache_ref,
        previous_cache_ref=session.previous_cache_ref,
        holder=session.holder,
        created_at_ms=session.created_at_ms,
        expires_at_ms=session.expires_at_ms,
        ttl_s=session.ttl_s,
        ttl_policy=_POLICY_TO_PB[session.ttl_policy],
        num_tokens=session.num_tokens,
        num_turns=session.num_turns,
        mark=session.mark,
        metadata=session.metadata,
        holders=session.holders or (),
        knows_holders=session.holders is not None,
        forked_from=session.forked_from[0] if session.forked_from else "",
        forked_generation=session.forked_from[1] if session.forked_from else 0,
    )


def session_from_pb(message: pb.Session) -> CacheSessionMetadata:
    """Return the row of a message. Raises KeyError for a state this version does not know."""
    return CacheSessionMetadata(
        session_id=message.session_id,
        tenant=message.tenant,
        model_id=message.model_id,
        mode=mode_from_pb(message.mode),
        state=_STATE_FROM_PB[message.state],
        generation=message.generation,
        cache_ref=message.cache_ref,
        previous_cache_ref=message.previous_cache_ref,
        holder=message.holder,
        created_at_ms=message.created_at_ms,
        expires_at_ms=message.expires_at_ms,
        ttl_s=message.ttl_s,
        ttl_policy=policy_from_pb(message.ttl_policy),
        num_tokens=message.num_tokens,
        num_turns=message.num_turns,
        mark=message.mark,
        metadata=dict(message.metadata),
        holders=tuple(message.holders) if message.knows_holders else None,
        forked_from=(message.forked_from, message.forked_generation) if message.forked_from else None,
    )


def new_session_from_pb(message: pb.ReserveSessionRequest) -> NewSession:
    """Return what a reserve call asks for."""
    return NewSession(
        tenant=message.tenant,
        session_id=message.session_id,
        model_id=message.model_id,
        mode=mode_from_pb(message.mode),
        ttl_s=message.ttl_s,
        ttl_policy=policy_from_pb(message.ttl_policy),
        metadata=dict(message.metadata),
    )


def terms_to_pb(tenant: TenantId, session_id: SessionId, terms: Terms) -> pb.TouchSessionRequest:
    """Return the request that changes a session's terms."""
    return pb.TouchSessionRequest(
        tenant=tenant,
        session_id=session_id,
        ttl_s=terms.ttl_s,
        ttl_policy=None if terms.ttl_policy is None else policy_to_pb(terms.ttl_policy),
        metadata=None if terms.metadata is None else pb.Metadata(entries=terms.metadata),
    )


def terms_from_pb(message: pb.TouchSessionRequest) -> Terms:
    """Return the terms that a request changes."""
    return Terms(
        ttl_s=message.ttl_s if message.HasField("ttl_s") else None,
        ttl_policy=policy_from_pb(message.ttl_policy) if message.HasField("ttl_policy") else None,
        metadata=dict(message.metadata.entries) if message.HasField("metadata") else None,
    )


def segment_to_pb(segment: Segment) -> pb.Segment:
    """Return the message of a segment."""
    return pb.Segment(
        kind=_KIND_TO_PB[segment.kind],
        text=segment.text,
        messages_json=segment.messages_json,
        token_ids=segment.token_ids,
    )


def segment_from_pb(message: pb.Segment) -> Segment:
    """Return the segment of a message."""
    kind = SegmentKind.ANSWER if message.kind == pb.SEGMENT_KIND_ANSWER else SegmentKind.PROMPT
    return Segment(
        kind=kind,
        token_ids=tuple(message.token_ids),
        text=message.text,
        messages_json=message.messages_json,
    )


def segments_from_pb(messages: Iterable[pb.Segment]) -> tuple[Segment, ...]:
    """Return the segments of a repeated field."""
    return tuple(segment_from_pb(message) for message in messages)


def repeatable_to_pb(repeatable: Repeatable | None) -> pb.Repeatable | None:
    """Return the message of a request that may come again; None of none."""
    return None if repeatable is None else pb.Repeatable(key=repeatable.key, request=repeatable.request)


def repeatable_from_pb(message: pb.Repeatable) -> Repeatable | None:
    """Return the request of a message; None of one that is not set."""
    return Repeatable(message.key, message.request) if message.key else None


def commit_to_pb(commit: TurnCommit) -> pb.TurnCommit:
    """Return the message of a commit."""
    return pb.TurnCommit(
        tenant=commit.tenant,
        session_id=commit.session_id,
        lease_id=commit.lease_id,
        expected_generation=commit.expected_generation,
        keep_segments=commit.keep_segments,
        segments=[segment_to_pb(segment) for segment in commit.segments],
        cache_ref=commit.cache_ref,
        holder=commit.holder,
        repeatable=repeatable_to_pb(commit.repeatable),
        answer=commit.answer,
        usage=None if commit.usage is None else usage_to_pb(commit.usage),
        receipt=None if commit.receipt is None else receipt_to_pb(commit.receipt),
    )


def commit_from_pb(message: pb.TurnCommit) -> TurnCommit:
    """Return the commit of a message."""
    return TurnCommit(
        tenant=message.tenant,
        session_id=message.session_id,
        lease_id=message.lease_id,
        expected_generation=message.expected_generation,
        keep_segments=message.keep_segments,
        segments=segments_from_pb(message.segments),
        cache_ref=message.cache_ref,
        holder=message.holder,
        repeatable=repeatable_from_pb(message.repeatable),
        answer=message.answer,
        usage=usage_from_pb(message.usage) if message.HasField("usage") else None,
        receipt=receipt_from_pb(message.receipt) if message.HasField("receipt") else None,
    )


def receipt_to_pb(receipt: TurnReceipt) -> pb.TurnReceipt:
    """Return the message of a turn's receipt."""
    return pb.TurnReceipt(
        generation=receipt.generation,
        at_ms=receipt.at_ms,
        computed_tokens=receipt.computed_tokens,
        cached_tokens=receipt.cached_tokens,
        context_tokens=receipt.context_tokens,
        completion_tokens=receipt.completion_tokens,
        source=receipt.source,
        match=receipt.match,
        reason=receipt.reason,
        restore_ms=receipt.restore_ms,
        first_token_ms=receipt.first_token_ms,
        took_ms=receipt.took_ms,
    )


def receipt_from_pb(message: pb.TurnReceipt) -> TurnReceipt:
    """Return the receipt of a message."""
    return TurnReceipt(
        generation=message.generation,
        at_ms=message.at_ms,
        computed_tokens=message.computed_tokens,
        cached_tokens=message.cached_tokens,
        context_tokens=message.context_tokens,
        completion_tokens=message.completion_tokens,
        source=message.source,
        match=message.match,
        reason=message.reason,
        restore_ms=message.restore_ms if message.HasField("restore_ms") else None,
        first_token_ms=message.first_token_ms if message.HasField("first_token_ms") else None,
        took_ms=message.took_ms,
    )


def usage_to_pb(usage: Usage) -> pb.Usage:
    """Return the message of what was used."""
    return pb.Usage(key=usage.key, counts=usage.counts)


def usage_from_pb(message: pb.Usage) -> Usage:
    """Return what was used."""
    return Usage(message.key, dict(message.counts))


def held_to_pb(held: HeldCacheRef) -> pb.HeldCacheRef:
    """Return the message of a KV that a sidecar has."""
    return pb.HeldCacheRef(tenant=held.tenant, session_id=held.session_id, cache_ref=held.cache_ref)


def held_from_pb(message: pb.HeldCacheRef) -> HeldCacheRef:
    """Return the KV of a message."""
    return HeldCacheRef(message.tenant, message.session_id, message.cache_ref)


def manifest_to_pb(manifest: Manifest) -> sidecar_pb.Manifest:
    """Return the message of a manifest."""
    return sidecar_pb.Manifest(
        cache_ref=manifest.cache_ref,
        tenant=manifest.tenant,
        session_id=manifest.session_id,
        fingerprint=manifest.fingerprint,
        token_ids=manifest.token_ids,
        world_size=manifest.world_size,
        expires_at_ms=manifest.expires_at_ms,
        size_bytes=manifest.size_bytes,
        block_checksums=manifest.block_checksums,
        groups=groups_to_pb(manifest.groups),
        tail_ref=manifest.tail_ref,
    )


def manifest_from_pb(message: sidecar_pb.Manifest) -> Manifest:
    """Return the manifest of a message, without its files, which follow from the rest. Raises InvalidRequest."""
    return Manifest(
        cache_ref=message.cache_ref,
        tenant=message.tenant,
        session_id=message.session_id,
        fingerprint=message.fingerprint,
        token_ids=tuple(message.token_ids),
        groups=groups_from_pb(message.groups) or (plain_group(len(message.token_ids), message.block_tokens),),
        files=(),
        world_size=message.world_size,
        expires_at_ms=message.expires_at_ms,
        size_bytes=message.size_bytes,
        block_checksums=tuple(message.block_checksums),
        tail_ref=message.tail_ref,
    )


def groups_to_pb(groups: Iterable[KVGroup]) -> list[sidecar_pb.KVGroup]:
    """Return the messages of groups of layers."""
    return [
        sidecar_pb.KVGroup(
            digest=group.digest,
            kind=group.kind,
            block_tokens=group.block_tokens,
            window=group.window,
            runs=[sidecar_pb.TokenRun(first_token=first, end_token=end) for first, end in group.runs],
        )
        for group in groups
    ]


def groups_from_pb(messages: Iterable[sidecar_pb.KVGroup]) -> tuple[KVGroup, ...]:
    """Return the groups of messages. Raises InvalidRequest for a kind that is not known."""
    return tuple(
        KVGroup(
            kind=kv_kind(message.kind),
            block_tokens=message.block_tokens,
            runs=tuple((run.first_token, run.end_token) for run in message.runs),
            window=message.window,
            digest=message.digest,
        )
        for message in messages
    )


def kept_group_to_pb(kept: KeptGroup) -> sidecar_pb.KeptGroup:
    """Return the message."""
    miss = kept.last_miss
    return sidecar_pb.KeptGroup(
        group=kept.group,
        num_tokens=kept.num_tokens,
        size_bytes=kept.size_bytes,
        expires_at_ms=kept.expires_at_ms,
        used_at_ms=kept.used_at_ms,
        num_manifests=kept.num_manifests,
        last_miss=None if miss is None else sidecar_pb.KeptMiss(matched=miss.matched, of=miss.of, at_ms=miss.at_ms),
    )


def kept_group_from_pb(message: sidecar_pb.KeptGroup) -> KeptGroup:
    """Return the group."""
    miss = message.last_miss
    return KeptGroup(
        group=message.group,
        num_tokens=message.num_tokens,
        size_bytes=message.size_bytes,
        expires_at_ms=message.expires_at_ms,
        used_at_ms=message.used_at_ms,
        num_manifests=message.num_manifests,
        last_miss=KeptMiss(miss.matched, miss.of, miss.at_ms) if message.HasField("last_miss") else None,
    )
