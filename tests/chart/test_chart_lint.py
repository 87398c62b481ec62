"""The chart as Helm judges it."""

from __future__ import annotations

import json
import tomllib

import pytest
import yaml

from deploy.chart.tools import HELMS
from tests.chart.each_release import in_each_release
from tests.chart.releases import RELEASES
from tests.chart.rendering import CHART, ROOT, Release, helm_says, run_helm


def chart_yaml() -> dict:
    """Return Chart.yaml."""
    return yaml.safe_load((CHART / "Chart.yaml").read_text())


@pytest.mark.parametrize("name", ["defaults", "everything", "envoy gateway", "inference pool", "no envoy"])
@pytest.mark.parametrize("helm", HELMS, ids=lambda helm: helm.version)
def test_lint_has_nothing_to_say(helm, name):
    values = json.dumps(RELEASES[name].values)
    done = run_helm(helm, "lint", str(CHART), "--strict", "--values", "-", stdin=values)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


def test_the_chart_says_for_which_clusters_it_is_and_needs_no_other_chart():
    chart = chart_yaml()

    assert (chart["apiVersion"], chart["type"], chart["kubeVersion"]) == ("v2", "application", ">=1.30.0-0")
    assert not chart.get("dependencies")


@pytest.mark.parametrize("helm", HELMS, ids=lambda helm: helm.version)
@pytest.mark.parametrize("version", ["1.29.9", "1.28.0"])
def test_an_older_cluster_is_refused(helm, version):
    status, _, complaint = helm_says(Release(RELEASES["defaults"].values, kube_version=version), helm)

    assert status != 0
    assert "1.30" in complaint


def test_a_vendor_s_version_of_1_30_is_taken():
    status, _, complaint = helm_says(Release(RELEASES["defaults"].values, kube_version="1.30.4-eks-a737599"))

    assert (status, complaint) == (0, "")


def test_the_chart_installs_the_version_of_this_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert chart_yaml()["appVersion"] == project["version"]


@in_each_release
def test_there_is_something_to_install(documents):
    assert len(documents) >= 8
