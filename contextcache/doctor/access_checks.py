"""Whether the front is there, what it says of itself, and whom it lets in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from contextcache.doctor.finding import Finding, failed, ok, skipped, warning
from contextcache.doctor.front import ApiKey, Front

_SKEW_S = 20.0
"""Signed identities live for a minute, certificates and TTLs are compared with clocks."""
_NO_KEY = ApiKey("context-cache-doctor-a-key-nobody-has")
_UNKNOWN = "ctx_00000000000000000000000000000000"
_FORGED = {"x-context-identity": "v1.eyJ0ZW5hbnQiOiJkb2N0b3IifQ.00", "x-gateway-destination-endpoint": "192.0.2.1:9"}


def reach(front: Front) -> Iterator[Finding]:
    """Say whether the front answers at all. Raises Unreachable."""
    answer = front.call("GET", "/healthz", with_key=False)
    if answer.status == 200:
        yield ok("reach", f"{front.url} answers in {answer.took_ms:.0f} ms", took_ms=round(answer.took_ms, 1))
    elif answer.status in {502, 503}:
        hint = "A proxy answers, but no gateway: run `kubectl get pods`, then read the gateway's log."
        yield failed("reach", f"GET /healthz: {answer.describe()}", hint)
    else:
        hint = "The answer is not from context-cache. Check the host, and the route to the gateway."
        yield failed("reach", f"GET /healthz: {answer.describe()}", hint)


def clock(front: Front, *, now_s: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Compare the front's clock with this machine's."""
    said = front.call("GET", "/healthz", with_key=False).headers.get("date")
    if said is None:
        yield skipped("clock", "the answer has no Date header")
        return
    skew_s = parsedate_to_datetime(said).timestamp() - now_s()
    if abs(skew_s) > _SKEW_S:
        hint = "One of the two clocks is wrong: check NTP on the nodes. Signed requests live for a minute."
        yield failed("clock", f"the front's clock is {skew_s:+.0f} s from this machine's", hint, skew_s=round(skew_s))
    else:
        yield ok("clock", "clocks agree", skew_s=round(skew_s))


def ready(front: Front) -> Iterator[Finding]:
    """Say whether the gateway has all it needs; a front tells no more to whoever asks."""
    answer = front.call("GET", "/readyz", with_key=False)
    found: Any = answer.body
    if not isinstance(found, dict) or "ready" not in found:
        yield failed("ready", f"GET /readyz: {answer.describe()}", "No gateway answers: check the gateway's pods.")
    elif found["ready"]:
        yield ok("ready", "the gateway is ready")
    else:
        hint = (
            "Run the doctor again with --gateway-metrics and the URL of the gateway's metrics port. Its "
            "`/readyz` names the missing part."
        )
        yield failed("ready", "the gateway is not ready", hint)


def details(metrics: Front) -> Iterator[Finding]:
    """Say what is missing, and how each pod is, by a gateway's metrics port."""
    answer = metrics.call("GET", "/readyz", with_key=False)
    found: Any = answer.body
    if not isinstance(found, dict) or "missing" not in found:
        yield failed("details", f"GET /readyz: {answer.describe()}", "This is not a gateway's metrics port.")
        return
    for missing in found["missing"]:
        yield failed("details", f"missing: {missing}", _missing_hint(str(missing)))
    yield from _pods(found.get("endpoints") or {})


def _missing_hint(missing: str) -> str:
    if missing == "context manager":
        return "Read the log of context-manager. Most often Redis is out of reach (URL, password, NetworkPolicy)."
    if missing == "ready endpoint":
        return (
            "No vLLM pod is ready. Is the model still loading? Do the pods have the label "
            "context-cache.io/engines? Is discovery.port right?"
        )
    return "The gateway is shutting down. Run the doctor again in a moment."


def _pods(endpoints: dict[str, Any]) -> Iterator[Finding]:
    if not endpoints:
        hint = (
            "Discovery finds no vLLM pod. Check engine.model, the pod injector and the label context-cache.io/engines."
        )
        yield failed("pods", "the gateway knows no pod", hint)
        return
    away = sorted(name for name, state in endpoints.items() if not state.get("ready"))
    draining = sorted(name for name, state in endpoints.items() if state.get("draining"))
    facts = {"pods": len(endpoints), "ready": len(endpoints) - len(away)}
    if away:
        yield warning(
            "pods", f"not ready: {', '.join(away)}", "Run `kubectl describe pod`, then read vLLM's log.", **facts
        )
    else:
        yield ok("pods", f"{len(endpoints)} of {len(endpoints)} pods are ready", **facts)
    alone = sorted(name for name, state in endpoints.items() if state.get("ready") and not state.get("tiers"))
    if alone:
        hint = (
            "Contexts of these pods are computed again after every engine restart. Read kv-sidecar's log and "
            "check its port."
        )
        yield warning("sidecars", f"no kv-sidecar answers on {', '.join(alone)}", hint)
    elif len(away) < len(endpoints):
        tiers = sorted({tier for state in endpoints.values() for tier in state.get("tiers") or []})
        yield ok("sidecars", f"all answer, with tiers {', '.join(tiers)}", tiers=tiers)
    yield from _pod_clocks(endpoints)
    if draining:
        hint = "These pods have the annotation context-cache.io/drain, or they are shutting down."
        yield warning("pods", f"draining: {', '.join(draining)}", hint)


def _pod_clocks(endpoints: dict[str, Any]) -> Iterator[Finding]:
    """Compare each pod's clock with the gateway's, as the gateway's probes saw it."""
    skews = {name: state.get("clock_skew_s") for name, state in endpoints.items()}
    known = {name: float(skew_s) for name, skew_s in skews.items() if isinstance(skew_s, int | float)}
    wrong = [f"{name} {skew_s:+.0f} s" for name, skew_s in sorted(known.items()) if abs(skew_s) > _SKEW_S]
    if wrong:
        hint = "Check NTP on the nodes. A pod whose clock is a minute ahead of the gateway answers contexts with 503."
        yield failed(
            "pod clocks", f"differ from the gateway's: {', '.join(wrong)}", hint, skew_s=max(known.values(), key=abs)
        )
    elif known:
        yield ok("pod clocks", "agree with the gateway's")


def keys(front: Front) -> Iterator[Finding]:
    """Say whether a key is asked for, and whether ours is one."""
    for check, key in (("no key", None), ("wrong key", _NO_KEY)):
        answer = front.call("GET", "/v1/context?limit=1", key=key, with_key=False)
        if answer.status == 401:
            yield ok(check, "is refused")
        elif answer.status == 200:
            hint = "Every client may use this deployment. Set API keys (auth), or bind the gateway to loopback."
            yield failed(check, "is accepted", hint, let_in=front.key is None)
        else:
            yield failed(check, f"is answered {answer.describe()}", "Expected 401. Read the gateway's log.")
    if front.key is None:
        yield skipped("key", "no key given (--api-key-file)")
        return
    answer = front.call("GET", "/v1/context?limit=1")
    if answer.status == 200:
        yield ok("key", "is accepted, and the session store answers")
    elif answer.status == 401:
        hint = (
            "The key's Secret holds SHA-256 hashes (`context-cache serve gateway hash-key`). Gateways follow "
            "its changes."
        )
        yield failed("key", "is unknown", hint)
    elif answer.status == 503:
        yield failed("key", f"is accepted, but: {answer.describe()}", _missing_hint("context manager"))
    else:
        yield failed("key", f"is answered {answer.describe()}", "Read the gateway's log.")


def isolation(front: Front) -> Iterator[Finding]:
    """Say whether a context nobody has is told apart from one that is there."""
    answer = front.call("GET", f"/v1/context/{_UNKNOWN}")
    if (answer.status, answer.code) == (404, "context_not_found"):
        yield ok("isolation", "an unknown context is a 404, as another tenant's context would be")
    else:
        hint = "Expected 404 context_not_found. Is another server in front of the gateway?"
        yield failed("isolation", f"an unknown context is answered {answer.describe()}", hint)


def forged_headers(front: Front, model: str) -> Iterator[Finding]:
    """Send what only the gateway may send: it must not get further than the front. Computes one token."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 1}
    answer = front.call("POST", "/v1/completions", body, headers=_FORGED)
    if answer.status == 200 and "x-session-id" not in answer.headers:
        yield ok("forged headers", "an identity and a pod chosen by the client are removed")
    elif answer.status == 200:
        hint = "A pod trusted the client. Do the pods share the gateway's signing secret, and is it secret?"
        yield failed("forged headers", "a request with a forged identity ran as a turn", hint)
    elif answer.status in {401, 403}:
        hint = (
            "The pod refused it, so there is no harm. But the front must remove these headers (docs/guides/envoy.md)."
        )
        yield warning("forged headers", "a forged identity reaches the pod", hint)
    else:
        hint = (
            "The request may have gone to the address in the client's header: remove it in front "
            "(docs/guides/envoy.md)."
        )
        yield failed("forged headers", f"are answered {answer.describe()}", hint)
