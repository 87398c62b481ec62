"""docs/operations/troubleshooting.md explains each value of `usage.context.reason`, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from contextcache.errors import ERRORS_BY_CODE
from kv_sidecar import resolve, saves

PAGE = Path("docs/operations/troubleshooting.md").read_text()
PLUGIN = Path("vllm_plugin")
SAYS_WHY = {"UncarriedEngine": 0, "GivenUp": 0, "leave_alone": 0, "_leave_out": 1, "give_up": 0, "skip": 1}
SAYS_WHY |= {"fail": 1, "_miss": 0, "Match": 2, "SaveEnds": 0, "end": 1, "_lose": 2, "_abandon": 2}
"""Calls of the connector that take a reason, and the place of the argument."""
CONSTANTS = {"NOTHING_LIKE_IT", "NOTHING_IN_COMMON", "HOLD_DEADLINE", "_SLOWER", "_WEIGHTS_CHANGED", "_LATE", "UNTOLD"}
"""Constants of the plugin that are reasons."""
WORDS = {"fault", "obstacle", "UNKNOWN", "CHANGED"}
"""Variables of the connector that hold one."""
SYMPTOMS = [
    "`prompt_tokens` does not fall",
    "Every turn is a miss",
    "409 `context_busy`",
    "404 or 410 for my session",
    "Pods not found",
    "503 `gateway_unavailable`",
    "503 without Redis",
    "429",
    "`ImagePullBackOff`",
    "A restore is slower than computing",
    "The engine starts but contexts are never saved",
    "Disk full, or evicted too early",
    "Clock skew",
    "TLS errors",
    "The console does not log in",
    "Envoy answers 5xx",
]


def said_by_the_plugin() -> Iterator[str]:
    """Yield the reasons that stand as texts in the plugin's source. It is not imported: that takes seconds."""
    for file in chain(PLUGIN.rglob("*.py"), Path("integrations").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            found: list[ast.expr] = []
            if isinstance(node, ast.Call) and "connector" in file.parts:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                found = node.args[SAYS_WHY[name] :][:1] if name in SAYS_WHY else []
                found += [word.value for word in node.keywords if word.arg == "reason"]
            elif isinstance(node, ast.FunctionDef) and node.name in {"refusal", "_obstacle"}:
                found = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
            elif isinstance(node, ast.Assign):
                names = {getattr(name, "id", "") for target in node.targets for name in ast.walk(target)}
                found = [node.value] if names & (CONSTANTS | WORDS if "connector" in file.parts else CONSTANTS) else []
            for part in found:
                yield from (leaf.value for leaf in ast.walk(part) if isinstance(leaf, ast.Constant) and leaf.value)


def explained() -> set[str]:
    table = PAGE.partition("### All values of `usage.context.reason`")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table.partition("| --- |")[2], re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`([a-z_]+)`", cell)}


def test_every_reason_of_the_code_is_explained_and_no_other() -> None:
    """Seen failing with a row taken out, and with a word that no code says."""
    said = set(said_by_the_plugin()) | {"read_only", "ranks_unknown"} | {saves.PULL_FAILED, saves.SAVE_DEADLINE}
    said.add(saves.ENGINE_GONE)
    said |= {resolve.NOTHING_LIKE_IT, resolve.NOTHING_IN_COMMON, resolve.WORLD_SIZE_DIFFERS}

    assert {
        "fingerprint_mismatch",
        "disk_hangs",
        "seal_deadline",
        "durability_unknown",
        "multimodal",
        "state_ahead",
    } <= said
    assert said - explained() == set()
    assert explained() - said - set(ERRORS_BY_CODE) == set()


def test_every_symptom_has_a_section_with_a_fix() -> None:
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))

    assert set(SYMPTOMS) <= set(sections)
    assert [title for title in SYMPTOMS if "fix" not in sections[title].lower()] == []
