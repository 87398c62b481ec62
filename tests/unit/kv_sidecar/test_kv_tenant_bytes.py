"""Bytes by tenant: a bounded number of names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kv_sidecar.metrics import TenantBytes


def shown(found: dict[str, int], tenants_max: int) -> dict[str, float]:
    registry = CollectorRegistry()
    tenants = TenantBytes("contextcache_sidecar_tenant_bytes", "x", registry=registry)
    tenants.show({"was-here": 5}, tenants_max=9)
    tenants.show(found, tenants_max=tenants_max)
    return {sample.labels["tenant"]: sample.value for family in registry.collect() for sample in family.samples}


def test_the_largest_tenants_have_names_and_the_rest_is_one_sum():
    found = {f"t{number}": number for number in range(1, 6)}

    assert shown(found, 2) == {"t5": 5, "t4": 4, "": 6}
    assert shown(found, 5) == found
    assert shown(found, 0) == {"": 15}
    assert shown({}, 5) == {}
