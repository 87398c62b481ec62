"""The record of one request with its client, and the phases of a turn. `Turn.advance` alone changes the phase."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from opentelemetry.context import Context, get_current
from typing_extensions import override

from contextcache.identity import Identity
from contextcache.model import NO_SAVE, CacheRef, CacheSessionMetadata, LoadedKV, SaveOutcome, SessionId, UsageFormat
from contextcache.phases import Phases
from vllm_plugin.turn.answer.chat import Dialect
from vllm_plugin.turn.answer.diagnostics import Comparison
from vllm_plugin.turn.answer.keep_alive import KeepAlive
from vllm_plugin.turn.answer.repeats import Recording
from vllm_plugin.turn.engine import Engine, Receive, Scope, Send
from vllm_plugin.turn.prompt.composition import ComposedPrompt
from vllm_plugin.turn.prompt.request import CHAT_PATH, TurnRequest
from vllm_plugin.turn.searching import EngineSearch


class Phase(Enum):
    """Phase of a turn. The last five end it."""

    LEASED = "leased"
    """The session is reserved or its transcript read. A turn without a commit holds no lease."""
    COMPOSED = "composed"
    GENERATING = "generating"
    SETTLING = "settling"
    """The answer is whole, and its last byte is held back."""
    COMMITTING = "committing"
    """The commit is sent."""
    IN_DOUBT = "in doubt"
    """A commit got no answer, so the manager may have made it durable."""
    COMMITTED = "committed"
    READ_ONLY = "read only"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    """Neither commit got an answer that says whether the first was made durable."""
    ABORTED = "aborted"


MAY_BE_DURABLE = (Phase.COMMITTING, Phase.IN_DOUBT)
"""Phases in which the manager may have made the commit durable: its KV must stay."""
_BEFORE_THE_END = (Phase.LEASED, Phase.COMPOSED, Phase.GENERATING, Phase.SETTLING, *MAY_BE_DURABLE)
PHASES = Phases(
    [
        ([Phase.LEASED], "prompt composed", Phase.COMPOSED),
        ([Phase.COMPOSED], "engine asked", Phase.GENERATING),
        ([Phase.GENERATING], "answer whole", Phase.SETTLING),
        ([Phase.SETTLING], "nothing to commit", Phase.READ_ONLY),
        ([Phase.SETTLING], "commit sent", Phase.COMMITTING),
        ([Phase.COMMITTING], "commit unanswered", Phase.IN_DOUBT),
        (MAY_BE_DURABLE, "committed", Phase.COMMITTED),
        ([Phase.SETTLING, Phase.COMMITTING], "commit refused", Phase.REFUSED),
        ([Phase.IN_DOUBT], "commit refused", Phase.UNKNOWN),
        (_BEFORE_THE_END, "aborted", Phase.ABORTED),
    ]
)


@dataclass(slots=True)
class Client:
    """A client's request: its head, the two ends of its connection, the engine behind it, and its dialect."""

    scope: Scope
    headers: dict[str, str]
    """Headers by lower-case name, repeated ones joined."""
    tag: str
    """Tag of its tenant; empty: unknown."""
    receive: Receive
    keep_alive: KeepAlive
    send: Send
    """`keep_alive`, or a `send` before it."""
    engine: Engine
    identity: Identity = field(init=False)
    """Set for a turn alone, once its signature is checked."""
    search: EngineSearch = field(init=False)
    """Set together with the identity."""
    dialect: Dialect = field(default_factory=Dialect)

    @property
    def path(self) -> str:
        """Path of the route."""
        return str(self.scope["path"])


@dataclass(slots=True)
class AnsweredRequest:
    """A request that engines answer, in one part or in several: a turn, or a request whose KV is kept."""

    client: Client
    request: TurnRequest
    save_ref: CacheRef | None = field(kw_only=True)
    """Name of the KV that the request saves; None: a turn that commits nothing and holds no lease. Each engine that
    answers a part has a name of its own."""
    session_id: SessionId = field(default="", kw_only=True)
    """Context, or group of a kept request."""
    prompt_ids: Sequence[int] = field(default=(), kw_only=True)
    """Token ids of the prompt, before its first engine is asked, or in a kept request, from the first event on."""
    request_id: str = field(default="", kw_only=True)
    """Name of the load report. Its random part keeps a client from naming another's."""
    recording: Recording | None = field(default=None, kw_only=True)
    """Record of the answer, for a request that may come again."""
    left_refs: tuple[CacheRef, ...] = field(default=(), kw_only=True)
    """Names under which engines that broke off were saving, the last first."""
    holder: str = field(default="", kw_only=True)
    """Other pod whose engine continues the answer; empty: none."""
    kv_at: str = field(default="", kw_only=True)
    """Sidecar of this pod, for an engine of another pod."""
    resumed: list[dict[str, str | int]] = field(default_factory=list, kw_only=True)
    """Each continuation by another engine: `at_token` (tokens known before), pods `from` and `to`, `paused_ms`."""
    loaded: LoadedKV | None = field(default=None, kw_only=True)
    trace: Context = field(default_factory=get_current, kw_only=True)
    """Context with the request's own span. The engine's task, which ends a turn, has another."""

    def __post_init__(self) -> None:
        """Name the request. Retries of a proxy share the gateway's part of the name."""
        self.request_id = f"{self.client.identity.request_id[:64]}-{secrets.token_hex(8)}"

    @property
    def part_id(self) -> str:
        """Name of the load report of the next part. The report of the first one is the request's."""
        return f"{self.request_id}-{len(self.resumed)}" if self.left_refs else self.request_id


@dataclass(slots=True)
class Turn(AnsweredRequest):
    """One turn while it runs."""

    session: CacheSessionMetadata
    lease_id: str
    is_create: bool
    started_ms: int
    prompt: ComposedPrompt = field(init=False)
    """Set once it is composed."""
    comparison: Comparison | None = None
    """The prompt beside that of the answer in `request.compared_with`; None: that names none."""
    retain_ms: int = 0
    """Minimum lifetime that its KV asks for; 0: none."""
    saved: SaveOutcome = NO_SAVE
    """Result of its save, with the answers to its hints, if it has waited for that."""
    num_precomputed: int = 0
    """Prompt tokens that pieces computed before the turn. The engine counts them as cached."""
    no_kv: str = ""
    """Reason why no KV could be reused, or, after a create, why none is durable yet."""
    timings_ms: dict[str, float] = field(default_factory=dict)
    first_token_s: float | None = None
    """Seconds from the lease to the first token; None: the answer was not streamed."""
    phase: Phase = Phase.LEASED

    @override
    def __post_init__(self) -> None:
        """Name the request, and record an answer that may be asked for again."""
        AnsweredRequest.__post_init__(self)  # `super` does not work in a class that `slots` makes anew
        self.session_id = self.session.session_id
        if self.request.repeatable and self.save_ref is not None:
            self.recording = Recording()

    @property
    def usage(self) -> UsageFormat:
        """Format of the usage. Each endpoint counts as its own API does (ADR 0091)."""
        of_endpoint = UsageFormat.OPENAI if self.request.path == CHAT_PATH else UsageFormat.CONTEXT
        return self.request.usage or self.client.identity.usage or of_endpoint

    @property
    def match(self) -> str:
        """How the prompt stood to the transcript: append, exact, extend, diverge; empty for a create."""
        return "" if self.is_create else self.prompt.outcome.value

    @property
    def load_refs(self) -> tuple[CacheRef, ...]:
        """Stored KV to start from, best first: the context's, or that of a new context's parent."""
        return self.client.identity.parent_refs if self.is_create else self.session.cache_refs

    def advance(self, event: str) -> None:
        """Change the phase."""
        self.phase = PHASES.after(self.phase, event)

    @property
    def has_ended(self) -> bool:
        """Whether no abort is due."""
        return not PHASES.allows(self.phase, "aborted")
