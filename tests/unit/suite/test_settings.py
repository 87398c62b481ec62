"""A setting that no test names is a finding: nobody would see it being ignored."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

from pydantic_settings import BaseSettings

ROOT = Path(__file__).resolve().parents[3]
PROCESSES = ("contextcache", "context_manager", "kv_sidecar", "vllm_plugin", "integrations", "gateway", "pod_injector")
CONNECTOR = ROOT / "vllm_plugin" / "connector" / "settings.py"
"""Its package brings torch: read, not imported."""
WORD = re.compile(r"\w+")


def settings_of_processes():
    """Yield each settings class that is read from the environment."""
    files = [file for process in PROCESSES for file in (ROOT / process).rglob("settings.py") if file != CONNECTOR]
    for file in files:
        module = import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
        for found in vars(module).values():
            if isinstance(found, type) and issubclass(found, BaseSettings) and found.model_config.get("env_prefix"):
                yield found


def connector_settings():
    """Return the fields of the connector's settings, whose package brings torch."""
    module = ast.parse(CONNECTOR.read_text())
    (found,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "ConnectorSettings")
    return [node.target.id for node in found.body if isinstance(node, ast.AnnAssign)]


def test_every_setting_is_named_by_a_test():
    here = Path(__file__)
    words = {word for file in (ROOT / "tests").rglob("*.py") if file != here for word in WORD.findall(file.read_text())}
    names = {
        f"{found.model_config['env_prefix']}{field.upper()}": field
        for found in settings_of_processes()
        for field in found.model_fields
    }
    names |= dict.fromkeys(connector_settings(), "")

    assert len(names) > 150
    assert sorted(name for name, field in names.items() if not {name, field} & words) == []
