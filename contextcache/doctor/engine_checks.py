"""Checks of the engines: versions, served models, and streams that arrive as they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contextcache.doctor.finding import Finding, failed, ok, skipped, warning
from contextcache.doctor.front import Front

_STREAM_TOKENS, _EVENTS_MIN = 32, 4
_LONG_S = 1.0
"""Events of a shorter answer may arrive together without a proxy that buffers."""
_BUFFERED_SHARE = 0.1


def model_names(front: Front) -> list[str]:
    """Return the served models; empty if the answer is not a list of models. Raises Unreachable."""
    body = front.call("GET", "/v1/models").body
    entries = body.get("data") if isinstance(body, dict) else None
    found = entries if isinstance(entries, list) else []
    return [str(entry["id"]) for entry in found if isinstance(entry, dict) and "id" in entry]


def models(front: Front, model: str) -> Iterator[Finding]:
    """Report the served models, and whether `model` (empty: any) is one of them."""
    answer = front.call("GET", "/v1/models")
    found = model_names(front) if answer.status == 200 else []
    if not found:
        hint = "No ready pod answered. Check the pods above, then read vLLM's log."
        yield failed("models", f"GET /v1/models: {answer.describe()}", hint)
    elif model and model not in found:
        text = f"{model} is not served; served: {', '.join(found)}"
        yield failed("models", text, "Pass one of them with --model.", models=found)
    else:
        yield ok("models", ", ".join(found), models=found)


def streaming(front: Front, model: str) -> Iterator[Finding]:
    """Stream an answer and judge the times of its events."""
    body = {"model": model, "prompt": "Count from one to twenty:", "max_tokens": _STREAM_TOKENS, "stream": True}
    stream = front.stream("/v1/completions", body)
    if stream.answer.status != 200:
        yield failed("streaming", f"is answered {stream.answer.describe()}", "Read vLLM's log.")
    elif not stream.is_complete:
        hint = "A component cut the stream. Check the timeouts of a proxy in front."
        yield failed("streaming", "the stream ended without [DONE]", hint)
    else:
        yield judge_stream(stream.arrivals_s)


def judge_stream(arrivals_s: Sequence[float]) -> Finding:
    """Return whether a proxy held back events. `arrivals_s`: seconds from the request to each event."""
    if len(arrivals_s) < _EVENTS_MIN or arrivals_s[-1] < _LONG_S:
        return skipped("streaming", "the answer was too short to tell whether a proxy buffers it")
    first_s, last_s = arrivals_s[0], arrivals_s[-1]
    facts = {"first_ms": round(first_s * 1000), "last_ms": round(last_s * 1000), "events": len(arrivals_s)}
    if last_s - first_s < _BUFFERED_SHARE * last_s:
        hint = "A proxy in front buffers. nginx: set proxy_buffering off. CDN: turn compression off."
        return warning("streaming", f"first part after {first_s:.1f} s of {last_s:.1f} s", hint, **facts)
    return ok("streaming", f"first part after {first_s:.1f} s, last after {last_s:.1f} s", **facts)


def versions(front: Front, own: str) -> Iterator[Finding]:
    """Report the versions of doctor and engine, and whether the gateway is ours."""
    engine, document = front.call("GET", "/version").body, front.with_key(None).call("GET", "/openapi.json").body
    found = {"doctor": own, "vllm": str(engine.get("version", "")) if isinstance(engine, dict) else ""}
    if isinstance(document, dict) and (document.get("info") or {}).get("title") == "context-cache":
        yield ok("versions", f"doctor {own}, vLLM {found['vllm'] or 'unknown'}", **found)
    else:
        hint = "GET /openapi.json is not the gateway's document. Is another or an old gateway in front?"
        yield warning("versions", f"doctor {own}; the gateway's version is unknown", hint, **found)
