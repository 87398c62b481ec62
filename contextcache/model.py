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
"""Owner of API keys. Contexts and KV belong to a tenant."""
ModelId: TypeAlias = str
"""Model as the client names it: the engine's served model name."""
KVKind: TypeAlias = Literal["full_attention", "sliding_window", "state"]
"""KV of a layer: of all tokens before, of a window of them, or one state after exactly that many tokens."""

DEFAULT_TTL_S = 3600
"""Default TTL of the EP."""
MIN_TTL_S = 60
MAX_TTL_S = 7 * 24 * 3600
MAX_LIST_LIMIT = 100


@dataclass(frozen=True, slots=True)
class KeptMiss:
    """Position where a prompt diverged from the kept KV of its conversation."""

    matched: int
    """Leading tokens of the prompt that stored KV of the tenant had."""
    of: int
    """Tokens of the prompt."""
    at_ms: int


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """Kept KV of plain requests that seem to be one conversation, at one sidecar."""

    group: SessionId
    num_tokens: int
    """Tokens of the longest manifest."""
    size_bytes: int
    """Bytes of all manifests; shared blocks count once."""
    expires_at_ms: int
    used_at_ms: int
    """Time of the last save or hit; 0: unknown."""
    num_manifests: int
    last_miss: KeptMiss | None = None


class SessionState(Enum):
    """State of a live session. Callers see a tombstone as an error (`ContextExpired`)."""

    CREATING = "creating"
    READY = "ready"
    BUSY = "busy"


class SessionMode(Enum):
    """Whether turns extend the context (`session`) or only read it (`prefix`)."""

    SESSION = "session"
    PREFIX = "prefix"


class TtlPolicy(Enum):
    """Whether a turn renews the TTL (`sliding`) or not (`fixed`)."""

    FIXED = "fixed"
    SLIDING = "sliding"


class ContextMode(Enum):
    """Meaning of a prompt: new text, the whole history again, or decided by comparison."""

    AUTO = "auto"
    APPEND = "append"
    REPLAY = "replay"


class UsageFormat(Enum):
    """Prompt tokens in an answer's usage: those outside the context, or all of them as OpenAI counts."""

    CONTEXT = "context"
    OPENAI = "openai"


class SegmentKind(Enum):
    """Author of a segment: the client (`prompt`) or the model (`answer`)."""

    PROMPT = "prompt"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One piece of a transcript, immutable. Segments of equal content are equal, packed or not.

    Exactly one of `text` (completions) and `messages_json` (chat, a JSON array) is non-empty, except for an empty
    answer. `token_ids` are the ids that the engine saw; the text is never tokenised again.
    """

    kind: SegmentKind
    token_ids: tuple[int, ...]
    text: str = ""
    messages_json: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of ids; does not unpack them."""
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
    """Empty for a conversation without a response."""
    mode: SessionMode
    state: SessionState
    generation: int
    """Number of the last committed turn; 0 while creating."""
    cache_ref: CacheRef
    """KV of `generation`; empty when none was saved."""
    previous_cache_ref: CacheRef
    """KV of the generation before, used if a crash lost the newest save; may be empty."""
    holder: str
    """Endpoint whose sidecar should have the KV; a hint."""
    created_at_ms: int
    expires_at_ms: int
    ttl_s: int
    ttl_policy: TtlPolicy
    num_tokens: int = 0
    num_turns: int = 0
    mark: str = ""
    """Name of this state of the transcript, minted by each commit; empty: unknown."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    holders: tuple[str, ...] | None = None
    """Endpoints whose sidecars may have its KV, with `holder`; None: unknown, any may have it."""
    forked_from: tuple[SessionId, int] | None = None
    """Session and generation that it is a fork of."""
    parent: SessionId = ""
    """Parent session: its agent started this one's agent. Empty: none."""
    computed_tokens: int = 0
    """Prompt tokens that its committed turns computed, turns that a rewind dropped included."""
    cached_tokens: int = 0
    """Prompt tokens that these turns did not compute."""
    saved_ms: int = 0
    """Estimated time that this saved, as `usage.context.saved_ms`."""

    @property
    def cache_refs(self) -> tuple[CacheRef, ...]:
        """KV names to ask a sidecar for, newest first."""
        return tuple(ref for ref in (self.cache_ref, self.previous_cache_ref) if ref)


@dataclass(frozen=True, slots=True)
class SessionPage:
    """One page of a tenant's sessions, newest first."""

    sessions: tuple[CacheSessionMetadata, ...]
    has_more: bool
    """True: more may follow, although this page may be short or empty."""
    last_id: SessionId
    """Start of the next page, not always the last of `sessions`. On the last page: the last session, or empty."""


@dataclass(frozen=True, slots=True)
class NewSession:
    """Terms of a new context."""

    tenant: TenantId
    session_id: SessionId
    model_id: ModelId
    mode: SessionMode = SessionMode.SESSION
    ttl_s: int = DEFAULT_TTL_S
    ttl_policy: TtlPolicy = TtlPolicy.FIXED
    metadata: Mapping[str, str] = field(default_factory=dict)
    parent: SessionId = ""
    """See CacheSessionMetadata."""


@dataclass(frozen=True, slots=True)
class Repeatable:
    """Request that the client may send again (`terms.read_repeatable`)."""

    key: str
    """Digest of its idempotency key, 32 hex digits."""
    request: str
    """Digest of the request itself, 32 hex digits."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """Stored answer of a committed request."""

    answer: bytes
    """Bytes as the pod packed them; empty: too large to store."""
    generation: int
    """Generation that it committed."""
    expires_at_ms: int
    """Expiry of the context after the commit."""
    request: str
    """Digest of the request, 32 hex digits."""


USAGE_COUNTS = (
    *("contexts", "turns", "computed_tokens", "cached_tokens", "completion_tokens", "saved_ms"),
    *("memory_kib_s", "disk_kib_s", "store_kib_s"),
)
"""Counters of a tenant: contexts created, turns answered, tokens of their receipts, time that cached tokens saved, and
KiB times seconds held in each tier."""
SAVED_COUNTS = ("computed_tokens", "cached_tokens", "saved_ms")
"""Counts that a session's row also sums over its own turns."""
MAX_USAGE_DAYS = 31
"""Days in one report."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of one API key with one model."""

    key: str
    """Name of the key; empty: usage of no key, such as bytes held."""
    counts: Mapping[str, int]
    """Count by name in USAGE_COUNTS; none is negative."""
    model: ModelId = ""
    """Empty: usage of no model, or counted by a release that did not send it."""


def saved_share(computed_tokens: int, cached_tokens: int) -> float | None:
    """Return the share of prompt tokens that were not computed, 0 to 1; None without a prompt token.

    Tokens that the engine's own prefix cache had count: the client did not send them, and the engine skipped them.
    """
    prompt_tokens = computed_tokens + cached_tokens
    return round(cached_tokens / prompt_tokens, 4) if prompt_tokens else None


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Usage of a tenant."""

    days: Mapping[int, Sequence[Usage]]
    """Usage by day since 1970-01-01 UTC, oldest first. Days without usage are absent."""
    num_contexts: int
    """Contexts that live now."""
    today: int


TURNS_KEPT = 32
"""Receipts that a session's row keeps, of its last turns."""
MAX_WORD_CHARS = 64
"""Length of a receipt's source, match and reason, which are short fixed phrases."""


@dataclass(frozen=True, slots=True)
class TurnReceipt:
    """Tokens and times of a turn, as its client received them. Tokens are counts."""

    generation: int
    """Generation that it committed."""
    at_ms: int
    """Unix time of the commit."""
    computed_tokens: int
    cached_tokens: int
    context_tokens: int
    """Leading prompt tokens that were in the context."""
    completion_tokens: int
    source: str
    """Origin of most cached tokens, as `usage.context.source`."""
    match: str = ""
    """Relation of the prompt to the context; empty for a create."""
    reason: str = ""
    """Reason for less reuse; empty: none."""
    restore_ms: int | None = None
    first_token_ms: int | None = None
    """Time to the first token of a stream."""
    took_ms: int = 0
    """Time to the commit."""


@dataclass(frozen=True, slots=True)
class TurnCommit:
    """One turn, to be stored atomically."""

    tenant: TenantId
    session_id: SessionId
    lease_id: str
    expected_generation: int
    """Generation that the turn continues; the row must still have it (0 for the create)."""
    keep_segments: int
    """Leading segments of the stored transcript that stay; the rest is replaced, as after a replay that diverged."""
    segments: tuple[Segment, ...]
    cache_ref: CacheRef
    """KV saved by this turn; empty when nothing was saved."""
    holder: str
    repeatable: Repeatable | None = None
    """The request, if the client may send it again: the commit stores its answer."""
    answer: bytes = b""
    """Stored answer; empty: too large."""
    usage: Usage | None = None
    """Usage of the turn, counted with the commit."""
    receipt: TurnReceipt | None = None
    """Receipt of the turn for the session's history."""
    model_id: ModelId = ""
    """Model of the turn. A context that has none yet belongs to it from then on."""


@dataclass(frozen=True, slots=True)
class HeldCacheRef:
    """KV at a sidecar, and the session that it was saved for."""

    tenant: TenantId
    session_id: SessionId
    cache_ref: CacheRef


_KV_KINDS: dict[str, KVKind] = {kind: kind for kind in get_args(KVKind)}


def kv_kind(text: str) -> KVKind:
    """Return the kind that a message or a file names. Raises InvalidRequest for an unknown one."""
    if text not in _KV_KINDS:
        raise InvalidRequest(f"unknown kind of KV; allowed: {', '.join(_KV_KINDS)}", param="groups")
    return _KV_KINDS[text]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of an engine that share one block table, and the tokens of a context whose KV they have."""

    kind: KVKind
    block_tokens: int
    """Tokens in one whole block file, a multiple of the engine's block of this group."""
    runs: tuple[tuple[int, int], ...]
    """Token ranges (first, end), ascending and disjoint. The last one ends with the context."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0: all before it."""
    digest: str = ""
    """Digest of the layers, 16 hex digits; empty: all layers of the engine, with full attention."""


def plain_group(num_tokens: int, block_tokens: int) -> KVGroup:
    """Return the group of an engine whose layers all have full attention."""
    return KVGroup("full_attention", block_tokens, ((0, num_tokens),))


@dataclass(frozen=True, slots=True)
class KVFile:
    """Block file of a context, the same for every rank."""

    group: int
    """Index of its group."""
    kind: Literal["block", "tail"]
    """`block`: whole and shared, named by its tokens and all before them. `tail`: partial, of this context alone."""
    name: str
    """Block id, or the cache_ref of a tail."""
    parent: str
    """Id of the preceding block; empty for the first."""
    first_token: int
    end_token: int
    """Index after the last token."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Minimum lifetime of sealed KV, as the sidecar has granted or denied it."""

    until_ms: int = 0
    """Unix time in ms until which nothing evicts the KV; 0: there is no promise."""
    pinned: bool = False
    """Whether it stays in memory too."""
    reason: str = ""
    """Reason for a denial: `no_room`, `tenant_share` or `not_saved`."""


NO_PROMISE = Promise()


@dataclass(frozen=True, slots=True)
class Placement:
    """Answer of the sidecar to a prefetch, a demotion or a share of sealed KV."""

    outcome: str = "denied"
    """`accepted`, `clipped` or `denied`."""
    reason: str = "not_saved"
    """Reason for less than was asked for; empty: all of it was granted."""
    size_bytes: int = 0
    """Prefetch: bytes that memory has, or gets now. Demotion: bytes that left it. Share: bytes of the KV."""
    tier: str = ""
    """Tier of these bytes: `host`, `disk` or `object`; empty after a denial."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a `cache_ref`: tokens with KV, their files, the fingerprint and the expiry."""

    cache_ref: CacheRef
    tenant: TenantId
    session_id: SessionId
    fingerprint: str
    token_ids: tuple[int, ...]
    groups: tuple[KVGroup, ...]
    files: tuple[KVFile, ...]
    """Files that follow from tokens and groups (kv_sidecar.format.manifest). A file's index is its `block_index`."""
    world_size: int
    expires_at_ms: int
    size_bytes: int = 0
    """Bytes of all block files of all ranks."""
    block_checksums: tuple[str, ...] = ()
    """Checksum of each file, rank by rank, in the order of `files`; empty: unknown."""
    tail_ref: CacheRef = ""
    """Owner of its tails; empty: itself. A fork has the tails of its source."""
    interrupted: bool = False
    """Whether its turn ended without a commit: it expires soon, and is evicted before any context."""
    promise: Promise = NO_PROMISE


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """Result of a save."""

    is_sealed: bool
    reason: str = ""
    """Reason why there is no KV, a short fixed phrase; empty: the save may still end well, or is forgotten."""
    promise: Promise = NO_PROMISE
    placements: tuple[Placement, ...] = ()
    """Answers to the placements that were asked for, in their order; empty: none was carried out."""


NO_SAVE = SaveOutcome(is_sealed=False)


@dataclass(frozen=True, slots=True)
class LoadedKV:
    """KV that a connector loaded for one request (LoadReport of kv_sidecar.proto)."""

    failed: bool
    device_tokens: int
    """Tokens that the engine had on its device."""
    loaded_tokens: int
    tier: str
    """`host`, `disk`, `peer`, `object`; empty: nothing was loaded."""
    restore_ms: float | None
    """Milliseconds from the first look-up to the end of the load; None: unknown."""
    reason: str = ""
    compute_us_per_token: float = 0.0
    """Microseconds that computing a token would have taken; 0: unknown."""


@dataclass(frozen=True, slots=True)
class ForkedKV:
    """KV of a fork."""

    size_bytes: int
    """Bytes; shared blocks count whole."""
    tier: str


BRANCH_LEASE_ID = "branch"
"""Lease of a fork that a turn is about to continue. The fork stays CREATING until that turn commits, and is in no list
before the turn begins. Every process may abort it, because no turn has this lease."""
