"""Which call a method and a path mean. Pure, and strict: what is not plainly spelled is refused, not repaired.

The pod classifies by the same decoded path, so a request that slipped past as `/v1//context` or `/v1/context/`
could only meet a route there that we did not mean. Our own namespace is never passed on unsigned.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import ClassVar

import grpc

from contextcache.errors import ContextCacheError

CONTEXT_PATH = "/v1/context"
COMPLETION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
OWN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"})
"""Answered here, without a key."""

_PLAIN_PATH = re.compile(r"(/[A-Za-z0-9_~!$&'()*+,;=:@.-]+)+")


class Kind(Enum):
    """What a request is. A completion becomes a turn or stateless once its body is read."""

    CREATE = "create"
    TURN = "turn"
    STATELESS = "stateless"
    CONTROL = "control"
    OWN = "own"
    COMPLETION = "completion"


class PathNotFound(ContextCacheError):
    """No such path here."""

    code: ClassVar[str] = "not_found"
    http_status: ClassVar[int] = 404
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.NOT_FOUND
    openai_type: ClassVar[str] = "invalid_request_error"


class MethodNotAllowed(ContextCacheError):
    """The path exists, with other methods; `allow` names them."""

    code: ClassVar[str] = "method_not_allowed"
    http_status: ClassVar[int] = 405
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNIMPLEMENTED
    openai_type: ClassVar[str] = "invalid_request_error"

    def __init__(self, message: str, *, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow


def kind_of(method: str, path: str, engine_paths: frozenset[str]) -> Kind:
    """Return what `method` on the decoded `path` is. Raises PathNotFound, MethodNotAllowed.

    `engine_paths` are the paths outside `/v1/` that reach the engine.
    """
    segments = path.split("/")
    if not _PLAIN_PATH.fullmatch(path) or "." in segments or ".." in segments:
        raise PathNotFound("no such path")
    if path in OWN_PATHS:
        return _allowed(Kind.OWN, method, "GET")
    if path.casefold() == CONTEXT_PATH or path.casefold().startswith(CONTEXT_PATH + "/"):
        return _context_kind(method, path)
    if path in COMPLETION_PATHS:
        return Kind.COMPLETION if method == "POST" else Kind.STATELESS
    if path.startswith("/v1/") or path in engine_paths:
        return Kind.STATELESS
    raise PathNotFound("no such path")


def _context_kind(method: str, path: str) -> Kind:
    if path == CONTEXT_PATH:
        return Kind.CREATE if method == "POST" else _allowed(Kind.CONTROL, method, "GET, POST")
    if not path.startswith(CONTEXT_PATH + "/") or path.count("/") > 3:
        raise PathNotFound("no such path")
    return _allowed(Kind.CONTROL, method, "GET, DELETE")


def _allowed(kind: Kind, method: str, allow: str) -> Kind:
    if method not in allow.split(", "):
        raise MethodNotAllowed(f"{method} is not possible here, only {allow}", allow=allow)
    return kind
