"""Bytes by tenant: each file once, a bounded number of names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kv_sidecar.block_key import BlockKey
from kv_sidecar.manifest_index import ManifestRecord
from kv_sidecar.tenant_bytes import TenantBytes, bytes_by_tenant


def key(name: str) -> BlockKey:
    return BlockKey("block", name * 64, 0)


def record(ref: str, tenant: str, *keys: BlockKey) -> ManifestRecord:
    return ManifestRecord(ref, tenant, f"ctx_{ref}", keys, num_tokens=1, expires_at_ms=1, size_bytes=10)


def test_a_block_of_several_contexts_counts_once_and_one_that_is_gone_not_at_all():
    sizes = {key("a"): 100, key("b"): 10, key("c"): 1}
    records = [
        record("1", "demo", key("a"), key("b")),
        record("2", "demo", key("a"), key("d")),
        record("3", "x", key("c")),
    ]

    assert bytes_by_tenant(records, sizes.get) == {"demo": 110, "x": 1}


def shown(found: dict[str, int], tenants_max: int) -> dict[str, float]:
    registry = CollectorRegistry()
    tenants = TenantBytes()
    registry.register(tenants)
    tenants.show({"was-here": 5}, tenants_max=9)
    tenants.show(found, tenants_max=tenants_max)
    return {sample.labels["tenant"]: sample.value for family in registry.collect() for sample in family.samples}


def test_the_largest_tenants_have_names_and_the_rest_is_one_sum():
    found = {f"t{number}": number for number in range(1, 6)}

    assert shown(found, 2) == {"t5": 5, "t4": 4, "": 6}
    assert shown(found, 5) == found
    assert shown(found, 0) == {"": 15}
    assert shown({}, 5) == {}
