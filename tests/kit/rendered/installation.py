"""What `helm install` would send to a cluster and print: one rendering, so that generated secrets fit each other."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from deploy.chart.tools import HELM_4
from tests.chart.manifests import of_kind, one
from tests.chart.rendering import CHART, Document, Release, documents, run_helm


@dataclass(frozen=True)
class Installation:
    """A release as Helm gives it away."""

    release: Release
    documents: list[Document]
    hooks: list[Document]
    """The pods of `helm test`."""
    notes: str

    def secret(self, name: str, key: str) -> str:
        """Return one value of a Secret that the chart made."""
        return base64.b64decode(one(of_kind(self.documents, "Secret"), "Secret", name)["data"][key]).decode()


def install(release: Release) -> Installation:
    """Render a release with its hooks and its notes; no cluster is asked."""
    done = run_helm(
        HELM_4,
        *("install", release.name, str(CHART), "--namespace", release.namespace),
        *("--dry-run=client", "--values", "-"),
        stdin=json.dumps(release.values),
    )
    assert done.returncode == 0, done.stderr
    made, _, notes = done.stdout.rpartition("\nNOTES:\n")
    hooks, _, manifest = made.partition("\nHOOKS:\n")[2].partition("\nMANIFEST:\n")
    return Installation(release, documents(manifest), documents(hooks), notes)
