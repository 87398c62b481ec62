"""Copies between pages and KV: one contract for KV in host memory and for both ways of a device, on a driver's twin."""

from __future__ import annotations

from tests.contract.paged_layers_contract import PagedLayersContract
from tests.kit.paged_kv import HostKind, TwinKind


class TestInHostMemory(PagedLayersContract):
    """By numpy."""

    kind = HostKind()


class TestRegistered(PagedLayersContract):
    """By lists of addresses, pages where they are."""

    kind = TwinKind(registered=True)


class TestStaged(PagedLayersContract):
    """By lists of addresses, pages through memory of our own."""

    kind = TwinKind(registered=False)
