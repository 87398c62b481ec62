"""Settings of a process: environment variables with its prefix, read once in `__main__`.

Each field's description says unit and reason; `python -m <package> --help` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings, SettingsConfigDict


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a process's certificate, key and trusted CA, and the name in the other certificates."""

    cert_file: Path
    key_file: Path
    ca_file: Path
    server_name: str


class ProcessSettings(BaseSettings):
    """Base of every process's settings: frozen, from the environment only. A field's docstring is its description."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _none_when_empty(cls, value: object, info: ValidationInfo) -> object:
        """Read an empty variable as None, where None is allowed."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        return None if value == "" and NoneType in get_args(annotation) else value


class TlsSettings(ProcessSettings):
    """Mutual TLS: with these files a process shows its certificate, and trusts only certificates of the CA."""

    tls_cert_file: Path | None = None
    """PEM certificate chain shown to other parts. Empty, with the next two settings: no TLS."""
    tls_key_file: Path | None = None
    """PEM private key of that certificate. Both files are read again when they change."""
    tls_ca_file: Path | None = None
    """PEM certificates of the CAs that sign the other parts' certificates."""
    tls_server_name: str = Field("context-cache", min_length=1)
    """Name in every part's certificate, whatever the part's address."""

    @model_validator(mode="after")
    def _all_files_or_none(self) -> Self:
        if len({file is None for file in (self.tls_cert_file, self.tls_key_file, self.tls_ca_file)}) > 1:
            raise ValueError("TLS_CERT_FILE, TLS_KEY_FILE and TLS_CA_FILE belong together: set all three or none")
        return self

    @property
    def tls(self) -> TlsFiles | None:
        """The files; None: TLS is off."""
        if self.tls_cert_file is None or self.tls_key_file is None or self.tls_ca_file is None:
            return None
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.tls_ca_file, self.tls_server_name)


class TracingSettings(ProcessSettings):
    """Export of trace spans."""

    traces_endpoint: str = ""
    """OTLP/gRPC address of a trace collector, http://host:4317 or https://…. Empty: no traces."""
    traces_sample_ratio: float = Field(0.1, ge=0, le=1)
    """Share of the traces that start here and are kept, 0 to 1. The caller decides for traces that it starts."""


def settings_help(settings: type[ProcessSettings], purpose: str) -> str:
    """Return the text of `--help`: purpose of the process, and every variable with default and meaning."""
    prefix = settings.model_config.get("env_prefix", "")
    lines = [purpose, "", "Environment variables:"]
    for name, field in settings.model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else f"default {default!r}"
        lines += [f"  {prefix}{name.upper()} ({shown})", f"      {' '.join((field.description or '').split())}"]
    return "\n".join(lines)


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, stripped of white space. Raises ValueError if it is shorter than 32 bytes."""
    secret = path.read_bytes().strip()
    if len(secret) < 32:
        raise ValueError(f"secret file {path} has {len(secret)} bytes; it needs at least 32")
    return secret
