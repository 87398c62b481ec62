"""Single parts behind the front, when their addresses are given: metrics of gateway and injector, a context-manager."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from contextcache.doctor.finding import Finding, failed, ok, skipped, warning
from contextcache.doctor.front import Front, Unreachable

_METRIC = "contextcache_gateway_requests_total"
_REVIEWS = re.compile(r'^contextcache_injector_reviews_total\{outcome="([a-z-]+)"\} ([0-9.e+]+)$', re.MULTILINE)
_PRECONDITIONS = re.compile(r'^contextcache_manager_redis_precondition\{name="([a-z_]+)"\} (\S+)$', re.MULTILINE)
_EVICTED = re.compile(r"^contextcache_manager_redis_evicted_keys (\S+)$", re.MULTILINE)
_RUST_FRONT_END = "rust-frontend"
_NOT_SKIPPED = {"injected", "present", "opted-out"}


def metrics(front: Front) -> Iterator[Finding]:
    """Say whether a gateway's metrics port serves its metrics."""
    try:
        answer = front.call("GET", "/metrics", with_key=False)
    except Unreachable as exc:
        yield failed("metrics", exc.reason, exc.hint)
        return
    if answer.status == 200 and _METRIC in answer.text:
        yield ok("metrics", f"{front.url} serves the gateway's metrics")
    else:
        hint = "Expected the port GATEWAY_METRICS_PORT of a gateway, 9090 in the chart."
        yield failed("metrics", f"{front.url}/metrics: {answer.status}, without {_METRIC}", hint)


def injector(front: Front) -> Iterator[Finding]:
    """Say how many pods an injector left alone since it started, by reason."""
    try:
        text = front.call("GET", "/metrics", with_key=False).text
    except Unreachable as exc:
        yield failed("injector", exc.reason, exc.hint)
        return
    if "contextcache_injector_reviews_total" not in text:
        hint = "Expected the port INJECTOR_METRICS_PORT of a pod injector, 9090 in the chart."
        yield failed("injector", f"{front.url}/metrics is not a pod injector's", hint)
        return
    outcomes = {outcome: int(float(number)) for outcome, number in _REVIEWS.findall(text)}
    skips = {reason: number for reason, number in sorted(outcomes.items()) if reason not in _NOT_SKIPPED and number}
    if skips:
        told = ", ".join(f"{reason} {number}" for reason, number in skips.items())
        hint = (
            "These pods run without context-cache. docs/operations/pod-injector.md explains the reason in their "
            "annotation context-cache.io/inject-skipped."
        )
        if _RUST_FRONT_END in skips:
            hint += " vLLM's Rust front end loads no middleware: remove VLLM_USE_RUST_FRONTEND from those pods."
        yield warning("injector", f"pods left alone since its start: {told}", hint)
    else:
        yield ok("injector", f"{outcomes.get('injected', 0)} pods injected since its start, none left alone")


def manager(front: Front) -> Iterator[Finding]:
    """Say how the Redis of a context-manager is set, by the manager's metrics."""
    try:
        text = front.call("GET", "/metrics", with_key=False).text
    except Unreachable as exc:
        yield failed("redis", exc.reason, exc.hint)
        return
    found = {name: float(number) for name, number in _PRECONDITIONS.findall(text)}
    if not found:
        hint = "Expected the port MANAGER_METRICS_PORT of a context-manager, 9090 in the chart."
        yield failed("redis", f"{front.url}/metrics is not a context-manager's", hint)
        return
    evicted = _EVICTED.search(text)
    if evicted and float(evicted[1]) > 0:
        hint = "Contexts are lost. Set maxmemory-policy to noeviction, and give Redis more memory."
        yield failed("redis", f"it evicted {float(evicted[1]):.0f} keys since its start", hint)
    unmet = sorted(name for name, value in found.items() if value == 0)
    if unmet:
        hint = "The manager's log tells the changes to make, and docs/operations/preconditions.md the reasons."
        yield warning("redis", f"preconditions not met: {', '.join(unmet)}", hint)
    elif all(math.isnan(value) for value in found.values()):
        yield skipped("redis", "its settings are unknown (is it down, or does its ACL user lack +info?)")
    else:
        yield ok("redis", "its settings meet all preconditions")
