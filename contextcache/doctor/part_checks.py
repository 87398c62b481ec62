"""Checks of single parts by their metrics ports: a gateway, an injector, a context manager. All raise Unreachable."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from contextcache.doctor.finding import CLOCK_SKEW_S, Finding, failed, ok, skipped, warning
from contextcache.doctor.front import Front

_GATEWAY, _REVIEWS = "contextcache_gateway_ext_proc_streams", "contextcache_injector_reviews_total"
_REVIEW = re.compile(rf'^{_REVIEWS}\{{outcome="([a-z-]+)"\}} ([0-9.e+]+)$', re.MULTILINE)
_PRECONDITION = re.compile(r'^contextcache_manager_redis_precondition\{name="([a-z_]+)"\} (\S+)$', re.MULTILINE)
_EVICTED = re.compile(r"^contextcache_manager_redis_evicted_keys (\S+)$", re.MULTILINE)
_RUST_FRONT_END = "rust-frontend"
_NOT_SKIPPED = {"injected", "present", "opted-out"}
STORE_CURE = "Read the log of context-manager. Most often Redis is out of reach (URL, password, NetworkPolicy)."
_CURES = {
    "context manager": STORE_CURE,
    "ready endpoint": "No pod is ready. Does it load, and has it context-cache.io/engines? Is discovery.port right?",
}
"""Cure by the part that a gateway misses."""


def gateway(front: Front) -> Iterator[Finding]:
    """Report whether a gateway serves its metrics, the parts that it misses, and the state of each pod."""
    answer = front.call("GET", "/metrics")
    if answer.status == 200 and _GATEWAY in answer.text:
        yield ok("metrics", f"{front.url} serves the gateway's metrics")
    else:
        hint = "Expected the port GATEWAY_METRICS_PORT of a gateway, 9090 in the chart."
        yield failed("metrics", f"{front.url}/metrics: {answer.status}, without {_GATEWAY}", hint)
    yield from details(front)


def details(front: Front) -> Iterator[Finding]:
    """Report the parts that a gateway misses, and the state of each pod."""
    answer = front.call("GET", "/readyz")
    if not isinstance(answer.body, dict) or "missing" not in answer.body:
        yield failed("details", f"GET /readyz: {answer.describe()}", "This is not a gateway's metrics port.")
        return
    for missing in answer.body["missing"]:
        cure = _CURES.get(str(missing), "The gateway is shutting down. Run the doctor again in a moment.")
        yield failed("details", f"missing: {missing}", cure)
    yield from _pods(answer.body.get("endpoints") or {})


def _pods(pods: Mapping[str, Any]) -> Iterator[Finding]:
    if not pods:
        hint = "Discovery finds no vLLM pod. Check engine.model, the injector and the label context-cache.io/engines."
        yield failed("pods", "the gateway knows no pod", hint)
        return
    ready = {name: state for name, state in sorted(pods.items()) if state.get("ready")}
    facts = {"pods": len(pods), "ready": len(ready)}
    if away := sorted(pods.keys() - ready.keys()):
        hint = "Run `kubectl describe pod`, then read the logs of vLLM and of its turn process."
        yield warning("pods", f"not ready: {', '.join(away)}", hint, **facts)
    else:
        yield ok("pods", f"{len(pods)} of {len(pods)} pods are ready", **facts)
    if alone := [name for name, state in ready.items() if not state.get("tiers")]:
        hint = "These pods compute contexts again after each engine restart. Read kv-sidecar's log, check its port."
        yield warning("sidecars", f"no kv-sidecar answers on {', '.join(alone)}", hint)
    elif ready:
        tiers = sorted({tier for state in pods.values() for tier in state.get("tiers") or []})
        yield ok("sidecars", f"all answer, with tiers {', '.join(tiers)}", tiers=tiers)
    yield from _clocks(pods)
    if draining := sorted(name for name, state in pods.items() if state.get("draining")):
        hint = "These pods have the annotation context-cache.io/drain, or they are shutting down."
        yield warning("pods", f"draining: {', '.join(draining)}", hint)


def _clocks(pods: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare each pod's clock with the gateway's, as the gateway's probes measured it."""
    skews = {name: state.get("clock_skew_s") for name, state in sorted(pods.items())}
    known = {name: float(skew_s) for name, skew_s in skews.items() if isinstance(skew_s, int | float)}
    if wrong := [f"{name} {skew_s:+.0f} s" for name, skew_s in known.items() if abs(skew_s) > CLOCK_SKEW_S]:
        hint = "Check NTP on the nodes. A pod whose clock is a minute ahead of the gateway answers contexts with 503."
        most = max(known.values(), key=abs)
        yield failed("pod clocks", f"differ from the gateway's: {', '.join(wrong)}", hint, skew_s=most)
    elif known:
        yield ok("pod clocks", "agree with the gateway's")


def injector(front: Front) -> Iterator[Finding]:
    """Report the pods that an injector skipped, by reason."""
    text = front.call("GET", "/metrics").text
    if _REVIEWS not in text:
        hint = "Expected the port INJECTOR_METRICS_PORT of a pod injector, 9090 in the chart."
        yield failed("injector", f"{front.url}/metrics is not a pod injector's", hint)
        return
    outcomes = {outcome: int(float(number)) for outcome, number in sorted(_REVIEW.findall(text))}
    skips = {reason: number for reason, number in outcomes.items() if reason not in _NOT_SKIPPED and number}
    if not skips:
        yield ok("injector", f"{outcomes.get('injected', 0)} pods injected since its start, none left alone")
        return
    hint = "These pods run without context-cache. Their annotation context-cache.io/inject-skipped has the reason."
    if _RUST_FRONT_END in skips:
        hint += " vLLM's Rust front end takes no token ids of a chat: remove VLLM_USE_RUST_FRONTEND there."
    counts = ", ".join(f"{reason} {number}" for reason, number in skips.items())
    yield warning("injector", f"pods left alone since its start: {counts}", hint)


def manager(front: Front) -> Iterator[Finding]:
    """Report the settings of a context manager's Redis."""
    text = front.call("GET", "/metrics").text
    found = {name: float(number) for name, number in _PRECONDITION.findall(text)}
    if not found:
        hint = "Expected the port MANAGER_METRICS_PORT of a context-manager, 9090 in the chart."
        yield failed("redis", f"{front.url}/metrics is not a context-manager's", hint)
        return
    evicted = _EVICTED.search(text)
    if evicted and float(evicted[1]) > 0:
        hint = "Contexts are lost. Set maxmemory-policy to noeviction, and give Redis more memory."
        yield failed("redis", f"it evicted {float(evicted[1]):.0f} keys since its start", hint)
    if unmet := sorted(name for name, value in found.items() if value == 0):
        hint = "The manager's log tells the changes to make, and docs/operations/preconditions.md the reasons."
        yield warning("redis", f"preconditions not met: {', '.join(unmet)}", hint)
    elif all(math.isnan(value) for value in found.values()):
        yield skipped("redis", "its settings are unknown (is it down, or does its ACL user lack +info?)")
    else:
        yield ok("redis", "its settings meet all preconditions")
