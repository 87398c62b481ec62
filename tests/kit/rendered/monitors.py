"""What a Prometheus would scrape that obeys the rendered PodMonitors."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from tests.chart.manifests import matches, of_kind
from tests.kit.rendered.cluster import Cluster
from tests.kit.rendered.pod import Pod

_SCRAPE_S = 30.0
_METRIC = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)[ {]", re.MULTILINE)


def scraped(cluster: Cluster) -> dict[str, set[str]]:
    """Return the names of the metrics of each pod that a monitor selects; what cannot be scraped is an error."""
    found: dict[str, set[str]] = {}
    for pod, endpoint in _targets(cluster):
        found.setdefault(pod.name, set()).update(_names(cluster, pod, endpoint))
    return found


def _targets(cluster: Cluster) -> Iterator[tuple[Pod, Mapping[str, Any]]]:
    for monitor in of_kind(cluster.made.documents, "PodMonitor"):
        for pod in cluster.pods:
            if matches(monitor["spec"]["selector"], pod.labels):
                yield from ((pod, endpoint) for endpoint in monitor["spec"]["podMetricsEndpoints"])


def _names(cluster: Cluster, pod: Pod, endpoint: Mapping[str, Any]) -> set[str]:
    address = f"{pod.address}:{pod.ports[endpoint['port']]}"
    for rule in endpoint.get("relabelings", []):
        if rule.get("sourceLabels") == ["__address__"] == [rule["targetLabel"]]:
            found = re.fullmatch(rule["regex"], address)
            assert found, rule
            address = found.expand(re.sub(r"\$(\d)", r"\\\1", rule["replacement"]))
    verify: ssl.SSLContext | bool = True
    extensions = {}
    if tls := endpoint.get("tlsConfig"):
        ca = tls["ca"]["secret"]
        verify = ssl.create_default_context(cadata=cluster.secret(ca["name"], ca["key"]))
        extensions = {"sni_hostname": tls["serverName"]}
    url = f"{endpoint.get('scheme', 'http')}://{address}{endpoint['path']}"
    with httpx.Client(verify=verify, timeout=_SCRAPE_S) as http:
        answer = http.get(url, extensions=extensions)
    assert answer.status_code == 200, (url, answer.text)
    return set(_METRIC.findall(answer.text))
