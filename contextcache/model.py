"""Sessions, transcripts and manifests as plain values: pure, no I/O, no wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias, get_args

from typing_extensions import override

from contextcache.errors import InvalidRequest

SessionId: TypeAlias = str
"""Public name of a context: `ctx_` + 128 random bits in hex, or the client's own (names.py)."""
CacheRef: TypeAlias = str
"""Name of the saved KV of one generation (the EP's `kv_cache_sidecar_ref`): `ref_` + 128 random bits in hex."""
TenantId: TypeAlias = str
"""Whoever an API key belongs to."""
ModelId: TypeAlias = str
"""Model as the client names it: the engine's served model name."""
KVKind: TypeAlias = Literal["full_attention", "sliding_window", "state"]
"""What a layer keeps of the tokens before: all of them, those of a window, or one state of exactly that many."""

DEFAULT_TTL_S = 3600
"""The EP's default life of a context."""
MIN_TTL_S = 60
MAX_TTL_S = 7 * 24 * 3600
MAX_LIST_LIMIT = 100


@dataclass(frozen=True, slots=True)
class KeptMiss:
    """Where a prompt left what was kept of its conversation."""

    matched: int
    """Tokens that something of the tenant's had of it."""
    of: int
    """Its tokens."""
    at_ms: int


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """The KV of plain requests that seem to be one conversation, at one sidecar."""

    group: SessionId
    num_tokens: int
    """Of the longest."""
    size_bytes: int
    """Of all, each block once."""
    expires_at_ms: int
    used_at_ms: int
    """When it was saved or found last; 0: not known."""
    num_manifests: int
    last_miss: KeptMiss | None = None


class SessionState(Enum):
    """Where a session stands; a tombstone is an error (`ContextExpired`), not a state a caller sees."""

    CREATING = "creating"
    READY = "ready"
    BUSY = "busy"


class SessionMode(Enum):
    """Whether turns extend the context (`session`) or only read it (`prefix`)."""

    SESSION = "session"
    PREFIX = "prefix"


class TtlPolicy(Enum):
    """Whether a turn extends the life (`sliding`) or not (`fixed`)."""

    FIXED = "fixed"
    SLIDING = "sliding"


class ContextMode(Enum):
    """How a prompt is read: decided by comparison, as new text, or as the whole history again."""

    AUTO = "auto"
    APPEND = "append"
    REPLAY = "replay"


class UsageFormat(Enum):
    """How an answer's usage counts the prompt: what was computed, beside the context, or the whole as OpenAI does."""

    CONTEXT = "context"
    OPENAI = "openai"


class SegmentKind(Enum):
    """Who wrote a segment: the client (`prompt`) or the model (`answer`)."""

    PROMPT = "prompt"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One piece of a transcript, immutable; equal to any other of the same content, packed or not.

    Exactly one of `text` (completions) and `messages_json` (chat, a JSON array) is non-empty, except for an
    empty answer. `token_ids` are what the engine saw; they are never made again from the text.
    """

    kind: SegmentKind
    token_ids: tuple[int, ...]
    text: str = ""
    messages_json: str = ""

    @property
    def num_tokens(self) -> int:
        """How many ids there are, without looking at them."""
        return len(self.token_ids)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and self._content() == other._content()

    @override
    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> tuple[object, ...]:
        return self.kind, self.text, self.messages_json, self.token_ids


@dataclass(frozen=True, slots=True)
class CacheSessionMetadata:
    """One session's row without its transcript (the EP's `CacheSessionMetadata`)."""

    session_id: SessionId
    tenant: TenantId
    model_id: ModelId
    mode: SessionMode
    state: SessionState
    generation: int
    """Number of the last committed turn; 0 while creating."""
    cache_ref: CacheRef
    """KV of `generation`; empty when none was saved."""
    previous_cache_ref: CacheRef
    """KV of the generation before: a fall-back when a crash lost the newest save; may be empty."""
    holder: str
    """Endpoint whose sidecar has the KV: a hint, never a requirement."""
    created_at_ms: int
    expires_at_ms: int
    ttl_s: int
    ttl_policy: TtlPolicy
    num_tokens: int = 0
    num_turns: int = 0
    mark: str = ""
    """Name of the transcript as it is, minted by the commit; empty when the release before committed last."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    holders: tuple[str, ...] | None = None
    """Endpoints whose sidecars may have KV of it, `holder` among them; None: not known, any may."""
    forked_from: tuple[SessionId, int] | None = None
    """Session and generation that it was forked from."""

    @property
    def cache_refs(self) -> tuple[CacheRef, ...]:
        """KV names worth asking a sidecar for, newest first."""
        return tuple(ref for ref in (self.cache_ref, self.previous_cache_ref) if ref)


@dataclass(frozen=True, slots=True)
class SessionPage:
    """One page of a tenant's sessions, newest first."""

    sessions: tuple[CacheSessionMetadata, ...]
    has_more: bool
    """Whether more may follow, although this page may be short, or empty."""
    last_id: SessionId
    """Where the next page goes on: not always the last of `sessions`. Of the last page the last of them, or empty."""


@dataclass(frozen=True, slots=True)
class NewSession:
    """What a client asks for when it creates a context."""

    tenant: TenantId
    session_id: SessionId
    model_id: ModelId
    mode: SessionMode = SessionMode.SESSION
    ttl_s: int = DEFAULT_TTL_S
    ttl_policy: TtlPolicy = TtlPolicy.FIXED
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A request that may come again (repeats.py)."""

    key: str
    """Digest of what the client calls it, 32 hex digits."""
    request: str
    """Digest of the request itself, 32 hex digits."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """What is kept of a request that was answered and committed."""

    answer: bytes
    """As the pod packed it; empty: it was too large to be kept."""
    generation: int
    """That it committed."""
    expires_at_ms: int
    """Of the context, after it."""
    request: str
    """Digest of the request, 32 hex digits."""


USAGE_COUNTS = (
    *("contexts", "turns", "computed_tokens", "cached_tokens", "completion_tokens", "saved_ms"),
    *("memory_kib_s", "disk_kib_s", "store_kib_s"),
)
"""What is counted of a tenant: contexts created, turns answered, tokens as their receipts told them, time that cached
tokens saved; and KiB times seconds held in each tier."""
MAX_USAGE_DAYS = 31
"""In one question."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used under one API key."""

    key: str
    """Its name; empty: nobody's in particular, such as bytes held."""
    counts: Mapping[str, int]
    """By name of USAGE_COUNTS; none is negative."""


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What was counted of a tenant."""

    days: Mapping[int, Sequence[Usage]]
    """By day since 1970-01-01, UTC, the oldest first; days without any are left out."""
    num_contexts: int
    """That live now."""
    today: int


TURNS_KEPT = 32
"""Receipts of a session's last turns."""
MAX_WORD_CHARS = 64
"""Of a receipt's source, match and reason, which are short fixed phrases."""


@dataclass(frozen=True, slots=True)
class TurnReceipt:
    """What a turn took and reused, as its client was told; tokens are counts."""

    generation: int
    """That it committed."""
    at_ms: int
    """When, Unix time."""
    computed_tokens: int
    cached_tokens: int
    context_tokens: int
    """Leading prompt tokens that the context had."""
    completion_tokens: int
    source: str
    """Where most of the cached ones came from, as `usage.context.source`."""
    match: str = ""
    """How the prompt stood to the context; empty for a create."""
    reason: str = ""
    """Why there was nothing, or less, to reuse."""
    restore_ms: int | None = None
    first_token_ms: int | None = None
    """Of a stream."""
    took_ms: int = 0
    """To the commit."""


@dataclass(frozen=True, slots=True)
class TurnCommit:
    """One turn, ready to be made durable in one step."""

    tenant: TenantId
    session_id: SessionId
    lease_id: str
    expected_generation: int
    """Generation the turn was built on; the row must still have it (0 for the create)."""
    keep_segments: int
    """Leading segments of the stored transcript that stay; the rest is replaced (a replay that diverged)."""
    segments: tuple[Segment, ...]
    cache_ref: CacheRef
    """KV saved by this turn; empty when nothing was saved."""
    holder: str
    repeatable: Repeatable | None = None
    """The request, if it may come again: its answer is kept with the commit."""
    answer: bytes = b""
    """What is kept of it; empty: it was too large."""
    usage: Usage | None = None
    """What the turn took, counted with the commit."""
    receipt: TurnReceipt | None = None
    """The same for the session's own history, kept with its last turns."""


@dataclass(frozen=True, slots=True)
class HeldCacheRef:
    """One KV that a sidecar has, and the session it was saved for."""

    tenant: TenantId
    session_id: SessionId
    cache_ref: CacheRef


_KV_KINDS: dict[str, KVKind] = {kind: kind for kind in get_args(KVKind)}


def kv_kind(text: str) -> KVKind:
    """Return the kind that a message or a file names. Raises InvalidRequest."""
    if text not in _KV_KINDS:
        raise InvalidRequest(f"unknown kind of KV; allowed: {', '.join(_KV_KINDS)}", param="groups")
    return _KV_KINDS[text]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of an engine that share one block table, and the tokens of a context that they have KV of."""

    kind: KVKind
    block_tokens: int
    """Tokens in one whole block file, a multiple of the engine's block of this group."""
    runs: tuple[tuple[int, int], ...]
    """(first token, behind the last), ascending and apart; the last ends with the context."""
    window: int = 0
    """Tokens that a token sees, itself included; 0: all before it."""
    digest: str = ""
    """16 hex digits for what the layers are; empty: all layers of the engine, with full attention."""


def plain_group(num_tokens: int, block_tokens: int) -> KVGroup:
    """Return the group of an engine whose layers are all full attention; before groups there was this one only."""
    return KVGroup("full_attention", block_tokens, ((0, num_tokens),))


@dataclass(frozen=True, slots=True)
class KVFile:
    """One block file of a context, the same for every rank."""

    group: int
    """Position of its group."""
    kind: Literal["block", "tail"]
    """`block`: whole, named by its tokens and all before them, shared. `tail`: less, and of this context alone."""
    name: str
    """Block id, or for a tail the cache_ref it was saved under."""
    parent: str
    """Id of the block before it; empty for the first."""
    first_token: int
    end_token: int
    """Behind the last."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a `cache_ref` is: which tokens have KV, in which files, under which fingerprint, until when."""

    cache_ref: CacheRef
    tenant: TenantId
    session_id: SessionId
    fingerprint: str
    token_ids: tuple[int, ...]
    groups: tuple[KVGroup, ...]
    files: tuple[KVFile, ...]
    """What tokens and groups come to (kv_sidecar.format.manifest); a file's position in it is its `block_index`."""
    world_size: int
    expires_at_ms: int
    size_bytes: int = 0
    """Bytes of all its block files, all ranks."""
    block_checksums: tuple[str, ...] = ()
    """Checksum of each of those files, rank by rank, in the order of `files`; none at all: not vouched for."""
    tail_ref: CacheRef = ""
    """Whose tails it has; empty: its own. A fork has those of what it was forked from."""


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What became of a save."""

    is_sealed: bool
    reason: str = ""
    """Why there will be no KV, as a short fixed phrase; empty: it may still come, or nobody remembers."""


@dataclass(frozen=True, slots=True)
class ForkedKV:
    """What a fork has."""

    size_bytes: int
    """Shared blocks counted whole; 0: the sidecar is of a release that does not say."""
    tier: str


BRANCH_LEASE_ID = "branch"
"""Lease of a fork that a turn is about to continue: it stays CREATING until that turn commits, and is in no list before
the turn has begun. Every part may abort it: no turn has this lease."""
