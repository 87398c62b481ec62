"""Requests that came another way than a gateway meant: let through while it was away, or meant for another pod.

Envoy lets the first through unrouted and says so in a header. Such a request may be stateless and nothing else: a
context needs the gateway's signature, and no gateway has removed keys that only our own parts may send. A
claim and a forbidden key are found as the gateway finds them.
"""

from __future__ import annotations

from collections.abc import Mapping

from contextcache.claim import SESSION_HEADER, TURN_PATHS, is_opaque, read_claims, refuse_session
from contextcache.errors import GatewayUnavailable, NoReadyEndpoint
from contextcache.identity import DESTINATION_HEADER
from contextcache.responses import continued_by
from vllm_plugin.turn.engine import ASGIApp, Message, Receive, Scope, Send, send_error
from vllm_plugin.turn.prompt.request import CONTEXT_PATH

_RETRY_AFTER_S = 1
_DESTINATION = DESTINATION_HEADER.encode()
_NOT_FOUND = 404


def stateless_body(path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return the body the engine may have. Raises GatewayUnavailable for a context's request, InvalidRequest."""
    if path == CONTEXT_PATH:
        raise _away()
    claims = None if is_opaque(headers.get("content-type", "")) else read_claims(body, path)
    if path not in TURN_PATHS:
        refuse_session(claims)
    elif continued_by(path, claims, headers.get(SESSION_HEADER)) is not None:
        raise _away()
    changed = None if claims is None else claims.changed()
    return body if changed is None else changed


def _away() -> GatewayUnavailable:
    return GatewayUnavailable("no gateway is available, so the context cannot be used", retry_after_s=_RETRY_AFTER_S)


def without_strangers(app: ASGIApp) -> ASGIApp:
    """Have an engine say 503 where it would say 404 to a request that was meant for another pod.

    A proxy that does not know a new pod yet sends its requests to any other pod, whose model may differ. The client
    must try again, not believe that there is no such model. By the address the connection came to; where
    that is translated on the way, a model or path that no pod has is 503 too.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _is_stranger(scope):
            await app(scope, receive, send)
            return
        is_refused = False

        async def told(message: Message) -> None:
            nonlocal is_refused
            if message["type"] == "http.response.start" and message["status"] == _NOT_FOUND:
                is_refused = True
                unreached = NoReadyEndpoint(
                    "the proxy has not reached the chosen pod yet", retry_after_s=_RETRY_AFTER_S
                )
                await send_error(send, unreached)
            elif not is_refused:
                await send(message)

        await app(scope, receive, told)

    return called


def _is_stranger(scope: Scope) -> bool:
    meant = next((value for name, value in scope["headers"] if name.lower() == _DESTINATION), b"").decode("latin-1")
    if not meant or (server := scope.get("server")) is None:
        return False
    # The protocol allows for several, in the order in which they are to be tried.
    return f"{server[0]}:{server[1]}" not in [one.strip() for one in meant.split(",")]
