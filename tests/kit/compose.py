"""compose.yaml as Docker Compose reads it: anchors, merges and variables resolved; services by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
_VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")


def read_compose(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the file; a variable without a value here has its default."""
    text = (ROOT / "compose.yaml").read_text()
    read: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(lambda found: (variables or {}).get(found[1], found[2]), text))
    return read


def transfer_config(service: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an engine's command says of its connector."""
    [option] = [word for word in service["command"] if word.startswith("--kv-transfer-config=")]
    read: dict[str, Any] = json.loads(option.partition("=")[2])
    return read
