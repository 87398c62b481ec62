"""Values that the documentation prints are rendered; charts, files and flags of its helm commands exist."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import yaml

from deploy.chart.tools import HELM_4
from tests.chart.rendering import CHART, REGISTRY, Release, helm_program, render
from tests.kit.pages import ROOT, Block, blocks, commands, programs

NAMES = yaml.safe_load((CHART / "values.yaml").read_text()).keys()
LEAST = {"image": {"registry": REGISTRY}, "engine": {"model": "Qwen/Qwen3-0.6B"}}
"""What an excerpt of values leaves out."""
OF_PAGES = {"my-values.yaml", "old-values.yaml", "stack-values.yaml"}
"""Files that the reader writes."""
SUBCOMMANDS = {"get", "install", "rollback", "template", "test", "uninstall", "upgrade"}
HELM = [
    (str(block), call[1:])
    for block in blocks("sh", "bash")
    for command in commands(block)
    for call in programs(command)
    if call[0] == "helm"
]


def values_of(block: Block) -> dict[str, Any] | None:
    """Return the values of a block, or None where it is none of the chart's."""
    found = yaml.safe_load(block.text.replace("sha256:…", f"sha256:{'0' * 64}"))
    return found if found.keys() <= NAMES else None


def over(least: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(least))
    for name, value in values.items():
        both = isinstance(merged.get(name), Mapping) and isinstance(value, Mapping)
        merged[name] = over(merged[name], value) if both else value
    return merged


VALUES = [block for block in blocks("yaml") if values_of(block) is not None]


@pytest.mark.parametrize("block", VALUES, ids=str)
def test_the_values_of_pages_are_rendered(block):
    """Seen to fail with `digests` written for `digest`."""
    assert len(VALUES) > 10
    assert render(Release(over(LEAST, values_of(block))))


@cache
def flags_of(command: str) -> set[str]:
    told = subprocess.run(
        [helm_program(HELM_4), *command.split(), "--help"], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", told))


@pytest.mark.parametrize(("place", "line"), HELM, ids=[f"{place} {line[0]}" for place, line in HELM])
def test_helm_commands_name_a_chart_files_and_flags_that_exist(place, line):
    """Seen to fail with `--name-space` for `--namespace`, and with values-openshft.yaml."""
    command = next(word for word in line if word in SUBCOMMANDS)
    command = "get values" if command == "get" else command
    named = {word.partition("=")[0] for word in line if re.match(r"--?[a-z]", word)}
    files = [line[number + 1] for number, word in enumerate(line) if word == "-f"]

    assert named <= flags_of(command), place
    assert [file for file in files if file not in OF_PAGES and not (ROOT / file).exists()] == []
    assert [word for word in line if word.startswith("charts/") and not (ROOT / word).exists()] == []
