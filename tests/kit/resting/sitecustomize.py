"""Found by Python at its start when this directory is on PYTHONPATH: vLLM's engines rest while they wait.

An engine's loop spins for a second after each step before it waits for word (vLLM 0.32,
distributed/device_communicators/shm_broadcast.py, SpinCondition). In a test run several engines and everything else
share two cores, and that second is taken from all of them. What an engine computes is the same. Used by tests only,
never by benchmarks; imports nothing of the project, for it runs before everything else.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "vllm.distributed.device_communicators.shm_broadcast"
_SPIN_S = 0.005


class _Finder(MetaPathFinder):
    """Changes the default of one argument when that module is imported, and is gone."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if (condition := getattr(module, "SpinCondition", None)) is not None:
                condition.__init__.__defaults__ = (_SPIN_S,)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
