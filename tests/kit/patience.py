"""Deadlines of stacks that must see the KV move: a busy machine may be seconds late, so small a model be faster.

The deadlines themselves are unit-tested, on injected clocks.
"""

from __future__ import annotations

CONNECTOR = {
    "deadline_factor": 10,
    "load_always_ms": 60_000,
}
"""For `kv_connector_extra_config`."""
PARTS = {
    "MANAGER_REDIS_TIMEOUT_S": "15",
    "TURN_RPC_DEADLINE_MS": "20000",
    "GATEWAY_MANAGER_TIMEOUT_S": "20",
    "GATEWAY_PULL_TIMEOUT_S": "20",
    "GATEWAY_SIDECAR_TIMEOUT_S": "20",
    "GATEWAY_DELETE_TIMEOUT_S": "25",
    "GATEWAY_PROBE_TIMEOUT_S": "10",
    "SIDECAR_BOUNDS": '{"pull_timeout_s": 30, "manifest_timeout_s": 20}',
}
"""For the environment of a stack's parts."""
