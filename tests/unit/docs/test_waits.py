"""docs/operations/waits.md: every duration that can be set is there, and every fixed one that it names is true."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from deploy.chart.process_settings import PROCESSES
from gateway.envoy.settings import EnvoySettings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operations/waits.md").read_text()
PACKAGES = (
    "contextcache", "context_manager", "kv_sidecar", "vllm_plugin", "integrations", "gateway", "pod_injector",
)  # fmt: skip
_DURATION = re.compile(r"(?<!_per)_(s|ms)$")


def connector_fields() -> list[str]:
    """Return the connector's settings, read: importing its package imports vLLM."""
    module = ast.parse((ROOT / "vllm_plugin/connector/settings.py").read_text())
    fields = next(found.body for found in module.body if isinstance(found, ast.ClassDef) and "Settings" in found.name)
    return [field.target.id for field in fields if isinstance(field, ast.AnnAssign)]


def settings() -> Iterator[str]:
    """Return every setting that is a duration, as the page writes it."""
    for prefix, model in PROCESSES.items():
        yield from (prefix + name.upper() for name in model.model_fields if _DURATION.search(name))
    yield from filter(_DURATION.search, connector_fields())


@cache
def constants() -> dict[str, float]:
    """Return every number of the product's modules that is called a duration: seconds by full name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for name, value in assigned(ast.parse(path.read_text())):
                if re.search(r"_(S|MS)$", name):
                    found[f"{module}.{name}"] = value / (1000 if name.endswith("_MS") else 1)
    return found


def assigned(module: ast.Module) -> Iterator[tuple[str, float]]:
    """Return the numbers that a module gives names to."""
    for statement in module.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        pairs = [(target, statement.value)]
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            pairs = list(zip(target.elts, statement.value.elts, strict=True))
        for name, value in pairs:
            code = compile(ast.Expression(value), "", "eval")
            if isinstance(name, ast.Name) and not code.co_names:
                number = eval(code)
                if isinstance(number, int | float):
                    yield name.id, number


def fixed_bounds() -> dict[str, list[float]]:
    """Return the fixed bounds that the page tells: seconds by the last two words of their names."""
    told: dict[str, list[float]] = {}
    for number, unit, name in re.findall(r"(\d+(?:\.\d+)?) (ms|s)[^|`·;]* \(`(\w+\.[A-Z_]+)`\)", PAGE):
        told.setdefault(name, []).append(float(number) / (1000 if unit == "ms" else 1))
    return told


def short(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def test_every_time_that_can_be_set_is_on_the_page():
    """Seen to fail with the row of `GATEWAY_BODY_TIMEOUT_S` taken out."""
    assert [setting for setting in settings() if f"`{setting}`" not in PAGE] == []


def test_every_setting_the_page_names_exists():
    """Seen to fail with `SIDECAR_HANDOVER_S` misspelt."""
    known = {prefix + name.upper() for prefix, model in PROCESSES.items() for name in model.model_fields}
    known |= {"--" + name.replace("_", "-") for name in EnvoySettings.model_fields} | {"--timeout-s"}
    known |= set(connector_fields())
    named = set(re.findall(r"`((?:GATEWAY|MANAGER|SIDECAR|TURN|INJECTOR)_[A-Z_]+|--[a-z-]+|[a-z_]+_ms)`", PAGE))

    assert named <= known, named - known
    assert len(named) > 30


def test_every_fixed_time_on_the_page_is_that_of_the_code():
    """Seen to fail with 31 s written for a head, and with a constant that moved to another module."""
    known: dict[str, list[float]] = {}
    for name, value in constants().items():
        known.setdefault(short(name), []).append(value)
    told = fixed_bounds()

    assert len(told) > 15
    assert {name: seconds for name, seconds in told.items() if set(seconds) != set(known.get(name, ()))} == {}
