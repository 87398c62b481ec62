"""Checks of the front: that it answers, that it refuses wrong keys, and that it removes forged headers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime

from contextcache.doctor.finding import CLOCK_SKEW_S, Finding, failed, ok, skipped, warning
from contextcache.doctor.front import ApiKey, Front
from contextcache.doctor.part_checks import STORE_CURE

_NO_KEY = ApiKey("context-cache-doctor-a-key-nobody-has")
_UNKNOWN = "ctx_00000000000000000000000000000000"
_FORGED = {"x-context-identity": "v1.eyJ0ZW5hbnQiOiJkb2N0b3IifQ.00", "x-gateway-destination-endpoint": "192.0.2.1:9"}


def reach(front: Front) -> Iterator[Finding]:
    """Report whether the front answers at all. Raises Unreachable."""
    answer = front.with_key(None).call("GET", "/healthz")
    if answer.status == 200:
        yield ok("reach", f"{front.url} answers in {answer.took_ms:.0f} ms", took_ms=round(answer.took_ms, 1))
        return
    hint = "The answer is not from context-cache. Check the host, and the route to the gateway."
    if answer.status in {502, 503}:
        hint = "A proxy answers, but no gateway: run `kubectl get pods`, then read the gateway's log."
    yield failed("reach", f"GET /healthz: {answer.describe()}", hint)


def clock(front: Front, *, now_s: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Compare the front's clock with this machine's."""
    date = front.with_key(None).call("GET", "/healthz").headers.get("date")
    if date is None:
        yield skipped("clock", "the answer has no Date header")
        return
    skew_s = parsedate_to_datetime(date).timestamp() - now_s()
    if abs(skew_s) > CLOCK_SKEW_S:
        hint = "One of the two clocks is wrong: check NTP on the nodes. Signed requests live for a minute."
        yield failed("clock", f"the front's clock is {skew_s:+.0f} s from this machine's", hint, skew_s=round(skew_s))
    else:
        yield ok("clock", "clocks agree", skew_s=round(skew_s))


def ready(front: Front) -> Iterator[Finding]:
    """Report whether the gateway is ready. A front does not name the missing part."""
    answer = front.with_key(None).call("GET", "/readyz")
    if not isinstance(answer.body, dict) or "ready" not in answer.body:
        yield failed("ready", f"GET /readyz: {answer.describe()}", "No gateway answers: check the gateway's pods.")
    elif answer.body["ready"]:
        yield ok("ready", "the gateway is ready")
    else:
        hint = (
            "Run the doctor with --gateway-metrics and the URL of the gateway's metrics port to see the missing part."
        )
        yield failed("ready", "the gateway is not ready", hint)


def keys(front: Front) -> Iterator[Finding]:
    """Report whether the front asks for a key, and whether it accepts ours."""
    for check, key in (("no key", None), ("wrong key", _NO_KEY)):
        answer = front.with_key(key).call("GET", "/v1/context?limit=1")
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
        hint = "The key's Secret holds SHA-256 hashes (`context-cache serve gateway hash-key`). Gateways reload it."
        yield failed("key", "is unknown", hint)
    elif answer.status == 503:
        yield failed("key", f"is accepted, but: {answer.describe()}", STORE_CURE)
    else:
        yield failed("key", f"is answered {answer.describe()}", "Read the gateway's log.")


def isolation(front: Front) -> Iterator[Finding]:
    """Report whether an unknown context is a 404."""
    answer = front.call("GET", f"/v1/context/{_UNKNOWN}")
    if (answer.status, answer.code) == (404, "context_not_found"):
        yield ok("isolation", "an unknown context is a 404, as another tenant's context would be")
    else:
        hint = "Expected 404 context_not_found. Is another server in front of the gateway?"
        yield failed("isolation", f"an unknown context is answered {answer.describe()}", hint)


def forged_headers(front: Front, model: str) -> Iterator[Finding]:
    """Send headers that only the gateway may send: the front must remove them. Computes one token."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 1}
    answer = front.call("POST", "/v1/completions", body, _FORGED)
    if answer.status == 200 and "x-session-id" not in answer.headers:
        yield ok("forged headers", "an identity and a pod chosen by the client are removed")
    elif answer.status == 200:
        hint = "A pod trusted the client. Do the pods share the gateway's signing secret, and is it secret?"
        yield failed("forged headers", "a request with a forged identity ran as a turn", hint)
    elif answer.status in {401, 403}:
        hint = "The pod refused it: no harm is done. But the front must remove these headers (docs/guides/envoy.md)."
        yield warning("forged headers", "a forged identity reaches the pod", hint)
    else:
        hint = "The request may have gone to the client's address: remove the header in front (docs/guides/envoy.md)."
        yield failed("forged headers", f"are answered {answer.describe()}", hint)
