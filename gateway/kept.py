"""Requests without a context, of keys that opted in: the conversation that such a request belongs to. Pure.

The client's label names the conversation, or else a hash of its beginning. The name chooses only the pod and the group.
KV is found by its tokens, so a wrong or shared label costs time and never an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from contextcache.beginning import beginning_hash, conversation_beginning
from contextcache.claim import TURN_PATHS, Claims
from contextcache.errors import InvalidRequest
from contextcache.model import KeptGroup, KeptMiss, SessionId, TenantId
from contextcache.names import KEPT_PREFIX

KEEP_HEADER = "x-context-keep"
"""Header of a client. `off`: keep nothing of this request."""
LABEL_HEADERS = (
    "x-dynamo-session-id",
    "x-claude-code-agent-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "session_id",
    "x-session-id",
    "x-session-affinity",
    "x-litellm-session-id",
)
"""Headers with a conversation's label, of Dynamo's clients, Claude Code (a sub-agent, then its session), Codex (a
thread, then a session in two spellings), OpenCode and pi, pi, litellm."""
PARENT_HEADERS = (
    "x-dynamo-parent-session-id",
    "x-claude-code-parent-agent-id",
    "x-codex-parent-thread-id",
    "x-parent-session-id",
)
"""Headers with the label of the conversation whose agent started this one, of Dynamo's clients, Claude Code, Codex and
OpenCode (Dynamo 1.6 lib/llm/src/protocols/agents.rs)."""
_LABEL_CHARS_MAX = 512


class Plain(Enum):
    """Treatment of a key's requests without a context, in rising order."""

    OFF = "off"
    ROUTE = "route"
    """All requests of a conversation go to one pod."""
    KEEP = "keep"
    """The sidecar also keeps its KV, which later requests find by their tokens."""


_ORDER = (Plain.OFF, Plain.ROUTE, Plain.KEEP)


def allowed(asked: Plain, most: Plain, path: str, headers: Mapping[str, str]) -> Plain:
    """Return the lower of two treatments, the key's and the highest of the deployment; off where a request opts out."""
    may_keep = path in TURN_PATHS and headers.get(KEEP_HEADER, "").strip().lower() != "off"
    return min(asked, most, key=_ORDER.index) if may_keep else Plain.OFF


def group_of(tenant: TenantId, headers: Mapping[str, str], claims: Claims, label_headers: Sequence[str]) -> SessionId:
    """Return the group of a conversation's KV. Other tenants cannot guess it."""
    label = _first(headers, (*label_headers, *LABEL_HEADERS)) or claims.text("prompt_cache_key") or ""
    return group_named(tenant, claims, label)


def parent_of(headers: Mapping[str, str]) -> str:
    """Return the label of the request's parent conversation; empty: none.

    Claude Code names the parent of nested agents only: the others were started by the session's main agent.
    """
    parent = _first(headers, PARENT_HEADERS)
    if not parent and headers.get("x-claude-code-agent-id"):
        parent = headers.get("x-claude-code-session-id", "")
    return parent


def group_named(tenant: TenantId, claims: Claims, label: str) -> SessionId:
    """Return the group of the conversation with this label; empty: of the conversation that begins like the request."""
    named = label.encode("utf-8", "surrogatepass")[:_LABEL_CHARS_MAX]
    return KEPT_PREFIX + beginning_hash(tenant, claims, named or b"\0" + conversation_beginning(claims))


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    return next((headers[name] for name in names if headers.get(name)), "")


@dataclass(frozen=True, slots=True)
class KeptConversation:
    """KV of one conversation, on all pods together."""

    group: SessionId
    num_tokens: int
    """Tokens of the longest request."""
    size_bytes: int
    expires_at_ms: int
    used_at_ms: int
    """Time of the last use; 0: unknown."""
    pods: tuple[str, ...]
    last_miss: KeptMiss | None


@dataclass(frozen=True, slots=True)
class KeptPage:
    """One page of conversations, last used first."""

    conversations: Sequence[KeptConversation]
    has_more: bool
    unreachable: Sequence[str]
    """Pods that did not answer."""


def page_of(
    found: Mapping[str, Sequence[KeptGroup]], unreachable: Sequence[str], *, limit: int, after: SessionId = ""
) -> KeptPage:
    """Return one page of the pods' answers. Raises InvalidRequest for an unknown `after`."""
    by_group: dict[SessionId, dict[str, KeptGroup]] = {}
    for pod, groups in found.items():
        for group in groups:
            by_group.setdefault(group.group, {})[pod] = group
    told = sorted(map(_together, by_group.values()), key=lambda one: (-one.used_at_ms, one.group))
    names = [one.group for one in told]
    if after and after not in names:
        raise InvalidRequest("this tenant has no kept conversation with this session_id", param="after")
    first = names.index(after) + 1 if after else 0
    return KeptPage(told[first : first + limit], len(told) > first + limit, unreachable)


def _together(pods: Mapping[str, KeptGroup]) -> KeptConversation:
    groups = list(pods.values())
    misses = [group.last_miss for group in groups if group.last_miss is not None]
    return KeptConversation(
        group=groups[0].group,
        num_tokens=max(group.num_tokens for group in groups),
        size_bytes=sum(group.size_bytes for group in groups),
        expires_at_ms=max(group.expires_at_ms for group in groups),
        used_at_ms=max(group.used_at_ms for group in groups),
        pods=tuple(sorted(pods)),
        last_miss=max(misses, key=lambda miss: miss.at_ms, default=None),
    )
