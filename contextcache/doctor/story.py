"""Check of a whole conversation: create a context, ask it, read it, delete it.

The check deletes its context whatever happens. If the delete fails, the context expires by its ttl.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from contextcache.doctor.finding import Finding, failed, ok, warning
from contextcache.doctor.front import Answer, Front, Unreachable

_TTL_S, _TOKENS = 300, 8
_FIRST = (
    "The following is a note on rivers. A river begins at a spring or where smaller streams meet, runs downhill "
    "through a valley it has made for itself, carries sand and gravel along, and ends in another river, in a lake or "
    "in the sea. "
)
_NEXT = " In one sentence: where does a river end?"
_RECEIPTS = ("x-session-id", "x-context-cache", "x-context-cached-tokens", "x-context-generation")
_READ_LOGS = "Read the logs of gateway, turn process and vLLM."
_CREATE_CURES = {
    "store_unavailable": "No connection to the context manager or its Redis: read the log of context-manager.",
    "gateway_unavailable": "Check the gateway's and vLLM's pods.",
    "no_ready_endpoint": "Check the gateway's and vLLM's pods.",
}
"""Cure of a failed create by the error's code."""
_STATUS_CURES = {
    200: "The answer has no session_id: it is not from a turn process. Do the pods have the port `turn` (turn_url)?",
    404: "No route leads to the gateway: POST /v1/context must reach it (docs/guides/envoy.md).",
}
"""Cure of a failed create by the status, for other codes."""
_MODEL = "the KV of this model is not supported. vLLM's log tells why, docs/operations/limits.md lists supported ones."
_ENGINE_CURES = {
    "context_parallel": "context parallelism splits pages: set its sizes to 1.",
    "encoder_decoder": _MODEL,
    "failure_policy": 'the engine needs "kv_load_failure_policy": "recompute" in --kv-transfer-config.',
    "no_layers": _MODEL,
    "ranks_differ": "the engine's ranks have different fingerprints: their weights or settings differ.",
    "unsupported_layers": _MODEL,
}
"""Cure by the reason for which the connector skips an engine."""


def story(front: Front, model: str) -> Iterator[Finding]:
    """Run the conversation. Raises Unreachable."""
    body = {"model": model, "prompt": _FIRST, "ttl": _TTL_S, "max_tokens": _TOKENS}
    created = front.call("POST", "/v1/context", body)
    session_id = created.body.get("session_id") if isinstance(created.body, dict) else None
    if created.status != 200 or not session_id:
        hint = _CREATE_CURES.get(created.code) or _STATUS_CURES.get(created.status, _READ_LOGS)
        yield failed("create", f"POST /v1/context: {created.describe()}", hint)
        return
    try:
        tokens = sum(int(_context_of(created).get(name, 0)) for name in ("computed_tokens", "cached_tokens"))
        text = f"a context of {tokens} tokens in {created.took_ms:.0f} ms"
        yield ok("create", text, ms=round(created.took_ms))
        yield from _receipts("create", created)
        yield from _ask(front, model, session_id)
        yield from _read(front, session_id)
    except BaseException:
        with suppress(Unreachable):
            front.call("DELETE", f"/v1/context/{session_id}")
        raise
    yield from _delete(front, model, session_id)


def _usage_of(answer: Answer) -> dict[str, Any]:
    usage = answer.body.get("usage") if isinstance(answer.body, dict) else None
    return usage if isinstance(usage, dict) else {}


def _context_of(answer: Answer) -> dict[str, Any]:
    return _usage_of(answer).get("context") or {}


def _receipts(check: str, answer: Answer) -> Iterator[Finding]:
    if missing := [name for name in _RECEIPTS if name not in answer.headers]:
        hint = "A proxy in front removes unknown headers, so clients lose their receipts."
        yield warning("receipts", f"{check}: no {', '.join(missing)}", hint)


def _ask(front: Front, model: str, session_id: str) -> Iterator[Finding]:
    body = {"model": model, "session_id": session_id, "prompt": _NEXT, "max_tokens": _TOKENS}
    asked = front.call("POST", "/v1/completions", body)
    if asked.status != 200:
        yield failed("ask", f"POST /v1/completions: {asked.describe()}", _READ_LOGS)
        return
    context, verdict = _context_of(asked), asked.headers.get("x-context-cache", "unknown")
    reason, source = str(context.get("reason", "")), context.get("source", "unknown")
    facts = {"verdict": verdict, "source": source, "ms": round(asked.took_ms), "reason": reason}
    text = f"{verdict}: {context.get('cached_tokens', 0)} of {context.get('context_tokens', 0)} tokens from {source}"
    if verdict == "hit" and reason not in _ENGINE_CURES:
        yield ok("ask", f"{text}, in {asked.took_ms:.0f} ms", **facts)
    else:
        cure = _ENGINE_CURES.get(reason, "read kv-sidecar's log, and check its socket and its disk.")
        hint = f"The answer is right, but the prompt was computed again: {cure}"
        yield warning("ask", f"{text} ({reason})" if reason else text, hint, **facts)
    yield from _receipts("ask", asked)
    yield _usage_rule(asked)


def _usage_rule(asked: Answer) -> Finding:
    usage, context = _usage_of(asked), _context_of(asked)
    computed, cached = int(context.get("computed_tokens", 0)), int(context.get("cached_tokens", -1))
    known, counted = int(context.get("context_tokens", 0)), int(usage.get("prompt_tokens", 0))
    total = counted + int(usage.get("completion_tokens", 0))
    # The doctor's key may count the whole prompt, as OpenAI does.
    adds_up = counted in (computed, computed + cached) and usage.get("total_tokens") == total
    facts = {"computed": computed, "cached": cached, "context": known}
    if computed >= 1 and cached >= 0 and cached + computed > known and adds_up:
        return ok("usage", f"{computed} tokens computed, {cached} from the cache", **facts)
    hint = "cached plus computed tokens must equal the context and the new text. Does a proxy in front change answers?"
    return failed("usage", "the figures of the turn do not add up", hint, **facts)


def _read(front: Front, session_id: str) -> Iterator[Finding]:
    answer = front.call("GET", f"/v1/context/{session_id}")
    body = answer.body
    if answer.status != 200 or not isinstance(body, dict):
        yield failed("read", f"GET /v1/context/{{id}}: {answer.describe()}", "Read the log of context-manager.")
        return
    state, tiers = (body.get("holder") or {}).get("state", "unknown"), body.get("tiers") or []
    facts = {"state": state, "tiers": tiers, "bytes": body.get("bytes"), "generation": body.get("generation")}
    if state in {"sealed", "pending"}:
        where = f" in {', '.join(tiers)}" if tiers else ""
        yield ok("read", f"generation {body.get('generation')}, KV {state}{where}", **facts)
    else:
        hint = "Each turn computes everything again. Read the log of the pod's kv-sidecar, check its disk and its port."
        yield warning("read", f"KV is {state}", hint, **facts)


def _delete(front: Front, model: str, session_id: str) -> Iterator[Finding]:
    path = f"/v1/context/{session_id}"
    deleted = front.call("DELETE", path)
    if deleted.status != 200:
        yield failed("delete", f"DELETE: {deleted.describe()}", f"The context expires after {_TTL_S} s at most.")
        return
    again = front.call("DELETE", path)
    turn = {"model": model, "session_id": session_id, "prompt": _NEXT, "max_tokens": 1}
    asked = front.call("POST", "/v1/completions", turn)
    if (again.status, asked.status) == (404, 404):
        yield ok("delete", "the context is gone: a turn and a second delete are 404")
    else:
        hint = "A deleted context must be a 404. Do all context managers use the same Redis?"
        yield failed("delete", f"after the delete: delete {again.status}, turn {asked.status}", hint)
