"""docs/operations/waits.md: every duration that can be set, and every fixed one as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from deploy.chart.process_settings import PROCESSES
from gateway.envoy.settings import EnvoySettings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operations/waits.md").read_text()
PACKAGES = (
    "contextcache", "context_manager", "kv_sidecar", "vllm_plugin", "gateway", "pod_injector",
)  # fmt: skip
NO_WAITS = {
    "contextcache.model.DEFAULT_TTL_S": "lives of contexts",
    "contextcache.model.MIN_TTL_S": "the same",
    "contextcache.model.MAX_TTL_S": "the same",
    "contextcache.requests._RETRY_AFTER_S": "what clients are told",
    "contextcache.wire.span_export._BATCH_INTERVAL_MS": "how often",
    "contextcache.wire.tls._LOOK_INTERVAL_S": "how often",
    "contextcache.wire.tls._RETRY_INTERVAL_S": "how often",
    "contextcache.wire.channels._SETTLING_S": "how often",
    "context_manager.limits.MAX_LEASE_TTL_MS": "the longest lease that may be asked for",
    "context_manager.redis_connection._LEAVING_S": "how often",
    "context_manager.store.BATCH_KNOWN_MS": "how long a batch is known",
    "context_manager.redis_address._LOOK_INTERVAL_S": "how often",
    "context_manager.redis_address._RETRY_INTERVAL_S": "how often",
    "context_manager.store.KEY_GRACE_MS": "how long Redis keeps what nobody sweeps",
    "context_manager.store.ANSWER_KEPT_MS": "how long something is kept",
    "context_manager.store.USAGE_KEPT_MS": "how long something is kept",
    "context_manager.store.DAY_MS": "what usage is counted by",
    "kv_sidecar.usage._LONGEST_MS": "what is counted at most",
    "context_manager.store.HOUR_MS": "what bytes are counted by",
    "context_manager.redis_bytes._SUMS_KNOWN_MS": "how long something is kept",
    "context_manager.preconditions._INTERVAL_S": "how often",
    "context_manager.preconditions._AWAY_INTERVAL_S": "how often",
    "context_manager.preconditions._REFUSED_INTERVAL_S": "how often",
    "context_manager.store_clock._INTERVAL_S": "how often",
    "context_manager.transcript_memory.IDLE_S": "how long something is kept",
    "context_manager.transcript_memory._SWEEP_S": "how often",
    "context_manager.store_clock._UNKNOWN_INTERVAL_S": "how often",
    "context_manager.store_clock._REFUSED_INTERVAL_S": "how often",
    "context_manager.store_clock._SKEW_TOLD_MS": "a difference of clocks",
    "kv_sidecar.tiers.arena._POLL_S": "how often",
    "kv_sidecar.catalog._FRESH_MS": "an age of files",
    "kv_sidecar.shared.encryption._LOOK_INTERVAL_S": "how often",
    "kv_sidecar.shared.tier._NOTE_MS": "how often",
    "kv_sidecar.sealed.matching.STAYS_MS": "how long something is kept",
    "gateway.tenants.keys._RECHECK_S": "how often",
    "gateway.http.carrier._KEEP_ALIVE_S": "an idle connection of ours",
    "gateway.envoy.server._READINESS_INTERVAL_S": "how often",
    "gateway.fronts.CORS_MAX_AGE_S": "what browsers are told",
    "gateway.pods.sidecars._SEALING_MS": "what a state is called",
    "gateway.pods.reflector._SHORT_WATCH_S": "what a watch is called",
    "gateway.pods.reflector._DELAY_S": "between two tries",
    "gateway.pods.reflector._REFUSED_DELAY_S": "between two tries",
    "gateway.pods.reflector._DELAY_MAX_S": "between two tries",
    "gateway.pods.reflector._STARTING_DELAY_MAX_S": "between two tries",
    "gateway.pods.roster.RETRY_AFTER_S": "what clients are told",
    "gateway.pods.routing._SHARE_RETRY_S": "what clients are told",
    "gateway.shares.SHARING_S": "how long something is kept",
    "vllm_plugin.turn.handover.REST_FROM_S": "shortest work that earns the loop a rest",
    "vllm_plugin.turn.middleware._SKEW_RETRY_S": "what clients are told",
    "gateway.pods.costs.REQUEST_S": "what something costs",
    "gateway.pods.costs.BESIDE_S": "the same",
    "gateway.pods.costs.MOVE_S": "the same",
    "gateway.pods.costs.MOVED_TOKENS_PER_S": "a rate",
    "gateway.pods.costs.DISK_TOKENS_PER_S": "the same",
    "contextcache.labels.PAUSE_MS": "how long a manager is left alone",
    "contextcache.wire.connections._ACCEPT_RETRY_S": "between two tries",
    "contextcache.wire.connections.PATIENCE_S": "the time before which no half-open connection gives way to another",
    "vllm_plugin.turn.admission._UNASKED_MS": "how long a sidecar is left alone",
    "vllm_plugin.turn.lmcache._IDLE_S": "how often",
    "vllm_plugin.turn.lmcache._PAUSE_S": "between two tries",
    "vllm_plugin.turn.lmcache._RETRY_MS": "between two tries",
    "vllm_plugin.turn.lmcache_api._PAUSE_S": "between two tries",
    "vllm_plugin.turn.unrouted._RETRY_AFTER_S": "what clients are told",
    "vllm_plugin.connector.loads.manifest_lookup._ASK_AGAIN_S": "how often",
    "vllm_plugin.connector.copies.registered_memory._LOOK_AGAIN_S": "how often",
    "vllm_plugin.connector.transfer._LOOK_AGAIN_S": "how often",
    "kv_sidecar.moving.pace._BYTES_PER_S": "a rate",
    "kv_sidecar.moving.pulling._ASK_AGAIN_S": "how often",
    "kv_sidecar.moving.pulling._MEASURED_MS": "what a rate is measured over",
    "kv_sidecar.moving.warming._ENGINE_S": "how often",
    "kv_sidecar.shared.tier.BACKOFF_S": "between two tries",
    "kv_sidecar.shared.tier._TOMBSTONE_MS": "how long a deleted name is remembered",
    "vllm_plugin.connector.sidecar_link._FIRST_PAUSE_MS": "between two tries",
    "vllm_plugin.connector.sidecar_link._LONGEST_PAUSE_MS": "between two tries",
    "contextcache.doctor.access_checks._SKEW_S": "a difference of clocks",
    "contextcache.doctor.engine_checks._LONG_S": "what is called slow",
    "contextcache.doctor.examination._POLL_S": "how often",
    "contextcache.doctor.story._TTL_S": "the life of its context",
    "contextcache.doctor.tls_check._SOON_S": "the life of a certificate",
    "gateway.envoy.clusters._KEEP_ALIVE_S": "an idle connection of Envoy's",
    "gateway.envoy.drain._POLL_S": "how often",
    "gateway.envoy.key_watch._INTERVAL_S": "how often",
}
"""Fixed times that bound no wait, and what they are."""
_DURATION = re.compile(r"(?<!_per)_(s|ms)$")


def connector_fields() -> list[str]:
    """Return the connector's settings, read: importing its package imports vLLM."""
    module = ast.parse((ROOT / "vllm_plugin/connector/settings.py").read_text())
    (fields,) = (found.body for found in module.body if isinstance(found, ast.ClassDef))
    return [field.target.id for field in fields if isinstance(field, ast.AnnAssign)]


def settings() -> Iterator[str]:
    """Return every setting that is a duration, as the page writes it."""
    for prefix, model in PROCESSES.items():
        yield from (prefix + name.upper() for name in model.model_fields if _DURATION.search(name))
    yield from filter(_DURATION.search, connector_fields())


@cache
def constants() -> dict[str, float]:
    """Return every number of the product's modules that is called a duration: seconds by full name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for name, value in assigned(ast.parse(path.read_text())):
                if re.search(r"_(S|MS)$", name):
                    found[f"{module}.{name}"] = value / (1000 if name.endswith("_MS") else 1)
    return found


def assigned(module: ast.Module) -> Iterator[tuple[str, float]]:
    """Return the numbers that a module gives names to."""
    for statement in module.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        pairs = [(target, statement.value)]
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            pairs = list(zip(target.elts, statement.value.elts, strict=True))
        for name, value in pairs:
            code = compile(ast.Expression(value), "", "eval")
            if isinstance(name, ast.Name) and not code.co_names:
                number = eval(code)
                if isinstance(number, int | float):
                    yield name.id, number


def fixed_bounds() -> dict[str, list[float]]:
    """Return the fixed bounds that the page tells: seconds by the last two words of their names."""
    told: dict[str, list[float]] = {}
    for number, unit, name in re.findall(r"(\d+(?:\.\d+)?) (ms|s)[^|`·;]* \(`(\w+\.[A-Z_]+)`\)", PAGE):
        told.setdefault(name, []).append(float(number) / (1000 if unit == "ms" else 1))
    return told


def short(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def test_every_time_that_can_be_set_is_on_the_page():
    """Seen to fail with the row of `GATEWAY_BODY_TIMEOUT_S` taken out."""
    assert [setting for setting in settings() if f"`{setting}`" not in PAGE] == []


def test_every_setting_the_page_names_exists():
    """Seen to fail with `SIDECAR_SAVE_DEADLINE_S` misspelt."""
    known = {prefix + name.upper() for prefix, model in PROCESSES.items() for name in model.model_fields}
    known |= {"--" + name.replace("_", "-") for name in EnvoySettings.model_fields} | {"--timeout-s"}
    known |= set(connector_fields())
    named = set(re.findall(r"`((?:GATEWAY|MANAGER|SIDECAR|TURN|INJECTOR)_[A-Z_]+|--[a-z-]+|[a-z_]+_ms)`", PAGE))

    assert named <= known, named - known
    assert len(named) > 60


def test_what_bounds_no_wait_still_exists():
    assert NO_WAITS.keys() <= constants().keys(), NO_WAITS.keys() - constants().keys()


def test_every_fixed_time_stands_once_as_the_page_says_or_bounds_no_wait():
    """Seen to fail with 31 s written for a head, with its row taken out, and with one told twice."""
    known = {short(name): [seconds] for name, seconds in constants().items() if name not in NO_WAITS}

    assert len(known) > 15
    assert fixed_bounds() == known
