"""How a process is configured: environment variables with the process's prefix, read once in `__main__`.

Each field's description gives unit and reason; `python -m <package> --help` prints them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings, SettingsConfigDict


class ProcessSettings(BaseSettings):
    """Base of every process's settings: frozen, environment only, unknown values refused by type."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")


def settings_help(settings: type[ProcessSettings], purpose: str) -> str:
    """Return the text of `--help`: what the process is for and every variable with its default and meaning."""
    prefix = settings.model_config.get("env_prefix", "")
    lines = [purpose, "", "Environment variables:"]
    for name, field in settings.model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else f"default {default!r}"
        lines += [f"  {prefix}{name.upper()} ({shown})", f"      {field.description or ''}"]
    return "\n".join(lines)


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, without surrounding white space. Raises ValueError when it is too short."""
    secret = path.read_bytes().strip()
    if len(secret) < 32:
        raise ValueError(f"the secret in {path} has {len(secret)} bytes; 32 or more are needed")
    return secret
