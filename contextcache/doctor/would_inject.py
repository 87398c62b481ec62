"""Preview of the injector's decision about the pods of a manifest, before a rollout.

The decision is code of the injector, which is in another distribution. So this module imports the injector on demand.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contextcache.doctor.finding import Finding, failed, ok, warning

_INJECTOR = "pod_injector"
_NOT_INSTALLED = (
    "--would-inject needs the injector, a part of another package: install context-cache-server[injector], "
    "or run the doctor in the context-cache image"
)
_CURES = "docs/operations/pod-injector.md lists a cure for each reason."
_SHAPE = "Does the API server take it? `kubectl apply --dry-run=server` says."
_NO_TEMPLATE = "it has no pod template: no mapping with a list of `containers`"


class NotJudged(ValueError):
    """The manifest cannot be judged: no file, no YAML, no pod template, or no injector installed."""


def would_inject(
    manifest: str, *, parts_file: Path | None = None, namespace: str = "", with_patch: bool = False
) -> Iterator[Finding]:
    """Yield a finding for each pod template of a file (`-`: standard input). Raises NotJudged.

    `parts_file`: the `parts.json` of a release. None: the chart's default values.
    """
    # The injector logs a traceback for a pod that it cannot read; here the finding is enough.
    logging.getLogger(_INJECTOR).addHandler(logging.NullHandler())
    try:
        parts, preview = (importlib.import_module(f"{_INJECTOR}.{name}") for name in ("parts", "preview"))
    except ModuleNotFoundError as exc:
        raise NotJudged(_NOT_INSTALLED) from exc
    try:
        release = parts.default_parts() if parts_file is None else parts.read_parts(parts_file)
        found = [*preview.previews(_read(manifest, preview.BYTES_MAX), release, namespace=namespace)]
    except (OSError, ValueError) as exc:
        raise NotJudged(str(exc)) from exc
    if not found:
        raise NotJudged(_NO_TEMPLATE)
    yield from (_finding(each, with_patch=with_patch) for each in found)


def _read(manifest: str, bytes_max: int) -> bytes:
    """Return the bytes of a file, at most one more than allowed."""
    if manifest == "-":
        return sys.stdin.buffer.read(bytes_max + 1)
    with Path(manifest).open("rb") as file:
        return file.read(bytes_max + 1)


def _finding(preview: Any, *, with_patch: bool) -> Finding:
    facts = {"outcome": preview.outcome} | ({"patch": preview.patch} if with_patch and preview.is_injected else {})
    check = "".join(character if character.isprintable() else "?" for character in preview.owner)
    if preview.with_label:
        return failed(check, preview.text, f"With the label: {preview.with_label}.", **facts)
    if not preview.is_injected:
        return failed(check, preview.text, _SHAPE if preview.outcome == "fault" else _CURES, **facts)
    if preview.warns:
        hint = "It may work: `helm test` and `context-cache doctor --story` show it."
        return warning(check, preview.text, hint, **facts)
    return ok(check, preview.text, **facts)


def patch_of(finding: Finding) -> str:
    """Return the patch of a finding as JSON; empty without a patch."""
    patch = finding.facts.get("patch")
    return json.dumps(patch, indent=2) if patch else ""
