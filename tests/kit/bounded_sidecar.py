"""A sidecar with other bounds than those of production: tests cannot wait for minutes or fill a queue of thousands.

`python -m tests.kit.bounded_sidecar`: as `python -m kv_sidecar`, with `SIDECAR_BOUNDS`, a JSON object.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from pydantic import Field, field_validator
from typing_extensions import override

from contextcache.process.run import run_part
from kv_sidecar import sidecar
from kv_sidecar.__main__ import run
from kv_sidecar.limits import Limits
from kv_sidecar.settings import SidecarSettings


class BoundedSettings(SidecarSettings):
    """Settings, and values for fields of the limits by name; `leftover_s` is a constant of sidecar.py."""

    bounds: dict[str, int | float] = Field(default_factory=dict)

    @field_validator("bounds")
    @classmethod
    def _are_known(cls, value: dict[str, int | float]) -> dict[str, int | float]:
        known = {field.name for field in fields(Limits)} | {"leftover_s"}
        assert value.keys() <= known, value.keys() - known
        return value

    @override
    def limits(self) -> Limits:
        bounds: dict[str, Any] = {name: value for name, value in self.bounds.items() if name != "leftover_s"}
        return replace(super().limits(), **bounds)


def main() -> None:
    """Run as a program."""
    settings = BoundedSettings()
    sidecar.LEFTOVER_S = int(settings.bounds.get("leftover_s", sidecar.LEFTOVER_S))
    run_part("sidecar", lambda stop: run(settings, stop), log_level=settings.log_level)


if __name__ == "__main__":
    main()
