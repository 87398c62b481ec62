"""Words for why nothing was saved: the sidecar's metric has a label for each that the connector's source says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import vllm_plugin.connector
from kv_sidecar.intake import REASONS_MAX

MODULES = {
    "engine_check",
    "identity/adapters",
    "copies/layout",
    "scheduler_side",
    "worker_side",
    "saves/saving",
}
"""Those that give saves up, or leave engines alone."""
SAYS_WHY = {"UncarriedEngine": 0, "SaveEnds": 0, "leave_alone": 0, "end": 1, "_end_part": 2, "_abandon": 2}
SAYS_WHY |= {"_leave_out": 1}
"""Calls that take such a word, and at which place."""
WORDS = {"fault", "obstacle", "reason", "_WEIGHTS_CHANGED", "_RANKS_UNKNOWN", "UNKNOWN", "CHANGED"}
"""Variables that hold one."""


def names_in(targets: list[ast.expr]) -> list[str]:
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def said_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        found: list[ast.AST] = []
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found = node.args[SAYS_WHY[name] :][:1] if name in SAYS_WHY else []
        elif isinstance(node, ast.Assign) and WORDS & set(names_in(node.targets)):
            found = [node.value]
        elif isinstance(node, ast.FunctionDef) and node.name == "_obstacle":
            found = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value is not None]
        for part in found:
            yield from (leaf.value for leaf in ast.walk(part) if isinstance(leaf, ast.Constant) and leaf.value)


def test_the_reasons_that_the_connector_gives_are_fewer_than_the_sidecar_shows() -> None:
    sources = Path(vllm_plugin.connector.__file__).parent
    trees = [ast.parse((sources / f"{name}.py").read_text()) for name in MODULES]
    words = {word for tree in trees for word in said_in(tree)}

    assert words >= {
        "no_layers",
        "ranks_unknown",
        "state_ahead",
        "arena_full",
        "no_arena",
        "not_computed",
        "null_block",
        "adapter_changed",
        "multimodal",
    }
    assert len(words) < REASONS_MAX
