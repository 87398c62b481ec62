"""Sizes and StorageClasses of volumes that exist: another spelling of a size is no change, any change is refused.

Seen to fail: the chart compared text. Kubernetes stores `1024Gi` as `1Ti`, so such a release refused every upgrade.
"""

from __future__ import annotations

import pytest

from tests.chart.clusters import HelmFailed
from tests.chart.releases import ENGINE, merged

CLAIMED = merged(ENGINE, {"redis": {"url": ""}, "sidecar": {"storage": {"type": "pvc"}}})
SPELLINGS = {
    "2 GiB": ["2048Mi", "2Gi", "2097152Ki", 2147483648, "2.0Gi"],
    "1 TiB": ["1024Gi", "1Ti", "1048576Mi", 1099511627776, "1.0Ti"],
}
OTHERS = {"0.5Ti": "512Gi", "1.5Ti": "1536Gi", "1000G": "1T", "0.1Ti": "109951162777600m"}
"""Sizes in values, and as Kubernetes stores them."""


def sized(valkey: object, sidecar: object) -> dict:
    return merged(CLAIMED, {"valkey": {"storage": {"size": valkey}}, "sidecar": {"storage": {"size": sidecar}}})


def test_five_spellings_of_one_size_upgrade_each_other(cluster, helm):
    spellings = list(zip(SPELLINGS["2 GiB"], SPELLINGS["1 TiB"], strict=True))
    cluster.helm(helm, "install", values=sized(*spellings[0]))
    for spelling in [*spellings, spellings[0]]:
        cluster.helm(helm, "upgrade", values=sized(*spelling))

    before = cluster.state()
    with pytest.raises(HelmFailed, match=r"valkey\.storage: .*2Gi"):
        cluster.helm(helm, "upgrade", values=merged(sized("2049Mi", "1Ti"), {"logLevel": "DEBUG"}))
    with pytest.raises(HelmFailed, match=r"sidecar\.storage: .*1Ti.*replicas: 1, its current number"):
        cluster.helm(helm, "upgrade", values=merged(sized("2Gi", "1025Gi"), {"logLevel": "DEBUG"}))
    assert cluster.state() == before


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "stored"), OTHERS.items())
def test_a_size_that_kubernetes_spells_otherwise_upgrades_with_the_same_values(cluster, helm, size, stored):
    for command in ("install", "upgrade"):
        cluster.helm(helm, command, values=sized(size, size))
    for name in ("cc-context-cache-valkey", "cc-context-cache-engine"):
        found = cluster.get("StatefulSet", name)
        assert found is not None
        [claim] = found["spec"]["volumeClaimTemplates"]
        assert claim["spec"]["resources"]["requests"]["storage"] == stored


def test_clearing_the_storage_class_is_refused_before_anything_changes(cluster, helm):
    """Seen to fail: Kubernetes refused the StatefulSet, when three Deployments had been upgraded."""
    fast = {"storage": {"storageClassName": "fast"}}
    values = merged(CLAIMED, {"valkey": fast, "sidecar": fast})
    cluster.helm(helm, "install", values=values)
    before = cluster.state()
    for part in ("valkey", "sidecar"):
        cleared = merged(values, {part: {"storage": {"storageClassName": ""}}, "logLevel": "DEBUG"})
        with pytest.raises(HelmFailed, match=rf"{part}\.storage: .*storageClassName fast"):
            cluster.helm(helm, "upgrade", values=cleared)
    assert cluster.state() == before
