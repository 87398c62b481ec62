"""Runs when a Python process of an injected vLLM container starts, before its program.

It appends the payload's packages to the search path, lets `context_cache_start` extend vLLM's arguments, and runs the
image's own `sitecustomize`. Python skips all of this with `-S`, `-I` or `-E`, or if a script unsets PYTHONPATH.

Packages are appended, because those of PYTHONPATH precede site-packages and would replace packages that vLLM brings.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PACKAGES = str(_HERE.parent / "packages")


def _run_hidden() -> None:
    """Run the `sitecustomize` that this file hides, as if Python had found it first."""
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if _PACKAGES not in sys.path:
    sys.path.append(_PACKAGES)
try:
    # The import costs milliseconds, so other programs skip it.
    if sys.argv and Path(sys.argv[0]).name in {"vllm", "-m"}:
        import_module("context_cache_start").add_arguments(sys.argv, sys.orig_argv, os.environ)
except Exception as exc:  # noqa: BLE001  # vLLM starts whatever goes wrong here
    sys.stderr.write(f"context-cache: vLLM's arguments stay as they are: {exc!r}\n")
_run_hidden()
