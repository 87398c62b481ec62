"""Runs when a Python process of an injected vLLM container starts: appends the payload to the search path.

Appended, not put before: PYTHONPATH comes before site-packages and would replace packages that vLLM brings. So only
this file's directory is on it. A `sitecustomize` of the image that this one hides is run as well.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PACKAGES = _HERE.parent / "packages"


def _append_packages() -> None:
    if str(_PACKAGES) not in sys.path:
        sys.path.append(str(_PACKAGES))


def _run_hidden() -> None:
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    # As if it had been found first, also for itself.
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_append_packages()
_run_hidden()
