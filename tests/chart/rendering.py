"""What Helm makes of the chart: renderings as lists of documents, each made once in a run of the tests."""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deploy.chart.tools import HELM_3, HELM_4, Helm, fetch

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "context-cache"
HELM_S = 120
"""Seconds one call of Helm may take; it takes a tenth of one on an idle machine."""
KUBE_VERSION = "1.32.0"

Document = dict[str, Any]


@dataclass(frozen=True)
class Release:
    """One installation: whose values, under which name, where, on what cluster."""

    values: Mapping[str, Any] = field(default_factory=dict)
    name: str = "cc"
    namespace: str = "llm"
    kube_version: str = KUBE_VERSION

    def key(self) -> str:
        """Return what makes this release different from others."""
        return json.dumps([self.values, self.name, self.namespace, self.kube_version], sort_keys=True)


class _Strict(yaml.CSafeLoader):
    """Refuses a key that is given twice, which the API server does too and YAML parsers do not."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if doubled := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"twice in one mapping: {doubled}", node.start_mark)
        return super().construct_mapping(node, deep)


_RENDERED: dict[tuple[str, str], list[Document]] = {}


@functools.cache
def helm_program(helm: Helm) -> Path:
    """Return the program, fetched when it is missing."""
    fetch((helm,))
    return helm.path


def run_helm(helm: Helm, *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None):
    """Run Helm without the configuration, plugins and cluster of whoever runs the tests."""
    with tempfile.TemporaryDirectory() as home:
        outside = {"HOME": home, "HELM_CACHE_HOME": home, "HELM_CONFIG_HOME": home, "HELM_DATA_HOME": home}
        return subprocess.run(
            [str(helm_program(helm)), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=HELM_S,
            check=False,
            # Helm lives a tenth of a second: it need not collect its garbage.
            env={**outside, "GOGC": "off", "KUBECONFIG": f"{home}/none", **(env or {})},
        )


def helm_says(release: Release, helm: Helm = HELM_4) -> tuple[int, str, str]:
    """Return exit status, output and complaint of `helm template`."""
    done = run_helm(
        helm,
        *("template", release.name, str(CHART), "--namespace", release.namespace),
        *("--kube-version", release.kube_version, "--values", "-"),
        stdin=json.dumps(release.values),
    )
    return done.returncode, done.stdout, done.stderr


def render(release: Release, helm: Helm = HELM_4) -> list[Document]:
    """Return the documents of a release; not to be changed, others get the same."""
    key = (release.key(), helm.version)
    if key not in _RENDERED:
        status, output, complaint = helm_says(release, helm)
        assert status == 0, complaint
        _RENDERED[key] = documents(output)
    return _RENDERED[key]


def render_both(release: Release) -> tuple[list[Document], list[Document]]:
    """Return what Helm 3 and Helm 4 make of it."""
    return render(release, HELM_3), render(release, HELM_4)


def documents(text: str) -> list[Document]:
    """Return the documents in Helm's output."""
    return [document for document in yaml.load_all(text, Loader=_Strict) if document]
