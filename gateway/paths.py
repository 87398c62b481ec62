"""Kinds of calls, by method and path. Pure.

A path with odd spelling is refused, not repaired: the pod routes by the same decoded path, so `/v1//context` could
meet an unintended route there. Calls in our own namespace never pass unsigned. `own_path` removes one slash at the end
of our paths, also of the path that a pod gets. The error for an unknown path names the nearest known one.

Calls of the engine pass if they compute an answer from the caller's own data. These do not pass: calls that steer the
engine (adapters, weights, caches, profiles, its load and settings), the engine's own stored responses, which any caller
with their id can read, calls that wrap other calls (`/invocations`), and the inner calls of engines in parts (`render`,
`derender`, `/inference/v1/…`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

from contextcache.claim import RESPONSES_PATH, TURN_PATHS
from contextcache.errors import MethodNotAllowed, PathNotFound
from contextcache.fields import nearest

CONTEXT_PATH = "/v1/context"
READ_PATHS = frozenset({"/v1/usage", "/v1/deployment"})
"""Reports of the gateway."""
MODEL_PATH = "/v1/models"
"""Prefix of one model's path; the name may have slashes. The engine serves only the list."""
CONVERSATIONS_PATH = "/v1/conversations"
_ID = "[A-Za-z0-9_-][A-Za-z0-9_.-]*"
OBJECT_PATHS = {
    CONVERSATIONS_PATH: "POST",
    f"{CONVERSATIONS_PATH}/{_ID}": "GET, POST, DELETE",
    f"{CONVERSATIONS_PATH}/{_ID}/items": "GET, POST",
    f"{CONVERSATIONS_PATH}/{_ID}/items/{_ID}": "GET, DELETE",
    f"{RESPONSES_PATH}/resp_{_ID}": "GET, DELETE",
    f"{RESPONSES_PATH}/resp_{_ID}/input_items": "GET",
}
"""Methods of OpenAI's stored objects, by the regular expression of their path."""
COMPACTION_PATHS = (f"{CONTEXT_PATH}/{_ID}/compact", f"{RESPONSES_PATH}/compact")
"""Regular expressions of the calls that compact. Pods work for them, so they take as long as turns."""
OBJECT_PATHS |= dict.fromkeys(COMPACTION_PATHS, "POST")
CONTEXT_CHANGES = ("fork", "rewind")
"""Changes of one context, the last segment of the path."""
CONSOLE_PATH = "/console"
"""Page of the console. Its files are one segment below."""
ROOT_PATH = "/"
"""Redirects to the console, if it is served."""
READ_METHODS = ("GET", "HEAD")
"""Methods allowed on paths that need no key."""
OWN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", CONSOLE_PATH})
"""Paths that the gateway answers without a key."""
METRICS_PATH = "/metrics"
"""Path among OWN_PATHS that a proxy in front hides."""

ENGINE_CALLS = frozenset(
    {
        "GET /v1/models",
        "POST /classify",
        "POST /detokenize",
        "POST /generative_scoring",
        "POST /pooling",
        "POST /rerank",
        "POST /score",
        "POST /tokenize",
        "POST /v1/audio/transcriptions",
        "POST /v1/audio/translations",
        "POST /v1/chat/completions",
        "POST /v1/chat/completions/batch",
        "POST /v1/completions",
        "POST /v1/embeddings",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "POST /v1/rerank",
        "POST /v1/responses",
        "POST /v1/score",
        "POST /v1/systemone",
        "POST /v2/embed",
        "POST /v2/rerank",
    }
)
"""Inference calls of vLLM 0.32, method and path. Any client with a key may send them."""
_KNOWN_PATHS = frozenset(
    {
        CONTEXT_PATH,
        CONVERSATIONS_PATH,
        *READ_PATHS,
        *OWN_PATHS - {METRICS_PATH},
        *(call.partition(" ")[2] for call in ENGINE_CALLS),
    }
)

_ENDS_BARE = frozenset({CONTEXT_PATH, CONVERSATIONS_PATH, *READ_PATHS, *OWN_PATHS}) - {METRICS_PATH}
_OURS = tuple(f"{path}/" for path in (CONTEXT_PATH, CONVERSATIONS_PATH, MODEL_PATH, RESPONSES_PATH))
_NAMED_PATH = f"{CONTEXT_PATH}/{{session_id}}"
"""Path of a context in error messages."""
TOKENIZER_PATHS = frozenset({"/detokenize", "/tokenize", "/v1/messages/count_tokens"})
"""Calls that the pod's API server answers without the engine."""

_PLAIN_PATH = re.compile(r"(/[A-Za-z0-9_~!$&'()*+,;=:@.-]+)+")
_OBJECT_PATHS = {re.compile(path): allow for path, allow in OBJECT_PATHS.items()}


class Kind(Enum):
    """Kind of a request. A completion becomes a turn or stateless once its body is read."""

    CREATE = "create"
    TURN = "turn"
    STATELESS = "stateless"
    CONTROL = "control"
    OWN = "own"
    COMPLETION = "completion"


def own_path(path: str) -> str:
    """Return a path of ours without one slash at its end, and any other path unchanged."""
    bare = path.removesuffix("/")
    is_ours = bare in _ENDS_BARE or bare.startswith(_OURS)
    return bare if is_ours and not bare.endswith("/") else path


def kind_of(method: str, path: str, engine_paths: frozenset[str]) -> Kind:
    """Return the kind of a method on a decoded path. Raises PathNotFound, MethodNotAllowed.

    `engine_paths`: calls beside ENGINE_CALLS that reach the engine, each a method and a path.
    """
    if path == ROOT_PATH and method in READ_METHODS:
        return Kind.OWN
    asked, path = path, own_path(path)
    segments = path.split("/")
    if not _PLAIN_PATH.fullmatch(path) or "." in segments or ".." in segments:
        raise _no_such_path(asked)
    if path in OWN_PATHS or (path.startswith(CONSOLE_PATH + "/") and path.count("/") == 2):
        return _allowed(Kind.OWN, method, ", ".join(READ_METHODS))
    is_read = path in READ_PATHS or path.startswith(MODEL_PATH + "/")
    if allow := "GET" if is_read else _object_methods(path):
        return _allowed(Kind.CONTROL, method, allow)
    if path.casefold() == CONTEXT_PATH or path.casefold().startswith(CONTEXT_PATH + "/"):
        return _context_kind(method, path)
    call = f"{method} {path}"
    if call not in ENGINE_CALLS and call not in engine_paths:
        if passing := methods_of(path, engine_paths):
            return _allowed(Kind.STATELESS, method, ", ".join(passing))
        raise _no_such_path(asked)
    return Kind.COMPLETION if method == "POST" and path in TURN_PATHS else Kind.STATELESS


def methods_of(path: str, engine_paths: Iterable[str]) -> list[str]:
    """Return the methods that pass to the engine on a path."""
    return sorted({call.partition(" ")[0] for call in (*ENGINE_CALLS, *engine_paths) if call.partition(" ")[2] == path})


def nearest_path(path: str) -> str | None:
    """Return the known path nearest to an unknown one; None if none is near."""
    for spelled in (path, f"/v1{path}", path.removeprefix("/v1")):
        bare = spelled.rstrip("/")
        if (found := bare if bare in _KNOWN_PATHS else nearest(bare, _KNOWN_PATHS)) is not None:
            return found
        parts = bare.split("/", 4)[2:]
        if len(parts) > 1 and nearest(f"/v1/{parts[0]}", (CONTEXT_PATH,)) is not None and bare.startswith("/v1/"):
            change = nearest(parts[2], CONTEXT_CHANGES) if len(parts) > 2 else None
            return _NAMED_PATH if change is None else f"{_NAMED_PATH}/{change}"
    return None


def _no_such_path(path: str) -> PathNotFound:
    meant = nearest_path(path)
    return PathNotFound("no such path" if meant is None else f"no such path: did you mean {meant}?")


def _object_methods(path: str) -> str:
    if path != CONVERSATIONS_PATH and not path.startswith(_OURS):
        return ""
    return next((allow for pattern, allow in _OBJECT_PATHS.items() if pattern.fullmatch(path)), "")


def _context_kind(method: str, path: str) -> Kind:
    if path == CONTEXT_PATH:
        return Kind.CREATE if method == "POST" else _allowed(Kind.CONTROL, method, "GET, POST")
    _, _, change = path.removeprefix(CONTEXT_PATH + "/").partition("/")
    if not path.startswith(CONTEXT_PATH + "/") or change not in {"", *CONTEXT_CHANGES} or path.endswith("/"):
        raise _no_such_path(path)
    return _allowed(Kind.CONTROL, method, "POST" if change else "GET, PATCH, DELETE")


def _allowed(kind: Kind, method: str, allow: str) -> Kind:
    if method not in allow.split(", "):
        raise MethodNotAllowed(f"method {method} is not allowed here; allowed: {allow}", allow=allow)
    return kind
