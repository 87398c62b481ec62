"""What Helm makes of the chart: renderings as lists of documents.

Each is made once a day by all processes that run tests, and kept in `.build` for as long as chart, values and Helm stay
what they are; what is random in it is new the next day.
"""

from __future__ import annotations

import fcntl
import functools
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.chart.tools import HELM_3, HELM_4, Helm, fetch

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "context-cache"
HELM_S = 120
"""Seconds one call of Helm may take; it takes a tenth of one on an idle machine."""
KUBE_VERSION = "1.32.0"
KEPT = ROOT / ".build" / "renderings"
KEPT_S = 24 * 3600
"""How long renderings stay after the last was added to theirs."""

REGISTRY = "registry.example.org"
"""The registry of our images, for each release that sets none: the chart in the tree installs with one only."""

Document = dict[str, Any]

EACH_HELM = (HELM_4, pytest.param(HELM_3, marks=pytest.mark.thorough))
"""Parameters of tests that each Helm passes: the older one in the longer run."""


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
    """Run Helm without the configuration, plugins and cluster of the user who runs the tests.

    With `--values -` the values in `stdin` are laid over one that names a registry for our images.
    """
    with tempfile.TemporaryDirectory() as home:
        registry = Path(home) / "registry.yaml"
        registry.write_text(f"image: {{registry: {REGISTRY}}}\n")
        if arguments[-2:] == ("--values", "-"):
            arguments = (*arguments[:-2], "--values", str(registry), "--values", "-")
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
    """Return exit status, output and complaint of `helm template`, of this run or of one before."""
    key = hashlib.sha256(f"{release.key()} {helm.program_sha256}".encode()).hexdigest()
    folder = kept_folder()
    kept = folder / f"{key}.json.gz"
    with _one_at_a_time(folder / f"{key}.lock"):
        if not kept.exists():
            said = _helm_says(release, helm)
            if not folder.name.endswith(_chart_digest()):
                return said  # somebody edits it at this moment
            making = kept.with_suffix(f".{os.getpid()}")
            making.write_bytes(gzip.compress(json.dumps(said).encode(), compresslevel=1))
            making.rename(kept)
    status, output, complaint = json.loads(gzip.decompress(kept.read_bytes()))
    return status, output, complaint


def render_ahead(releases: Iterable[Release], helm: Helm = HELM_4) -> None:
    """Have Helm render what is not kept yet, on all cores."""
    different = {release.key(): release for release in releases}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda release: helm_says(release, helm), different.values()))


@functools.cache
def kept_folder() -> Path:
    """Return where today's renderings of the chart as it is now are kept, and remove old ones."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for other in KEPT.iterdir():
        if other.is_dir() and other.stat().st_mtime < time.time() - KEPT_S:
            shutil.rmtree(other, ignore_errors=True)
    folder = KEPT / f"{time.strftime('%Y-%m-%d')}-{_chart_digest()}"
    folder.mkdir(exist_ok=True)
    return folder


def _chart_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in CHART.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(CHART)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold one rendering against other threads and processes.

    Not `lockf`: the kernel takes threads of two processes that wait for each other's renderings for a deadlock.
    """
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _helm_says(release: Release, helm: Helm) -> tuple[int, str, str]:
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
