"""A sidecar with other bounds than those of production: tests cannot wait for minutes or fill a queue of thousands.

`python -m tests.kit.bounded_sidecar`: as `python -m kv_sidecar`, with `SIDECAR_BOUNDS`, a JSON object.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from pydantic import Field, field_validator
from typing_extensions import override

from contextcache.process.run import run_part
from kv_sidecar import sidecar
from kv_sidecar.__main__ import run
from kv_sidecar.moving.leaving import HandOverLimits
from kv_sidecar.moving.pulling import PullLimits
from kv_sidecar.saves import CatalogLimits
from kv_sidecar.settings import SidecarSettings
from kv_sidecar.store.collector import CollectorLimits
from kv_sidecar.store.writer import SharedLimits

Limits = TypeVar("Limits", bound=Any)


class BoundedSettings(SidecarSettings):
    """Settings, and values for fields of the limits by name; `leftover_s` is a constant of sidecar.py."""

    bounds: dict[str, int | float] = Field(default_factory=dict)

    @field_validator("bounds")
    @classmethod
    def _are_known(cls, value: dict[str, int | float]) -> dict[str, int | float]:
        limits: list[Any] = [CatalogLimits, PullLimits, SharedLimits, CollectorLimits]
        known = {field.name for one in limits for field in fields(one)} | {"bytes_max", "leftover_s"}
        assert value.keys() <= known, value.keys() - known
        return value

    @override
    def limits(self) -> CatalogLimits:
        return self._bounded(super().limits())

    @override
    def pull_limits(self) -> PullLimits:
        return self._bounded(super().pull_limits())

    @override
    def shared_limits(self) -> SharedLimits:
        return self._bounded(super().shared_limits())

    @override
    def collector_limits(self) -> CollectorLimits:
        return self._bounded(super().collector_limits())

    @override
    def handover_limits(self) -> HandOverLimits:
        limits = super().handover_limits()
        return replace(limits, bytes_max=int(self.bounds.get("bytes_max", limits.bytes_max)))

    def _bounded(self, limits: Limits) -> Limits:
        names = {field.name for field in fields(limits)}
        return replace(limits, **{name: value for name, value in self.bounds.items() if name in names})


def main() -> None:
    """Run as a program."""
    settings = BoundedSettings()
    sidecar.LEFTOVER_S = int(settings.bounds.get("leftover_s", sidecar.LEFTOVER_S))
    run_part("sidecar", lambda stop: run(settings, stop), log_level=settings.log_level)


if __name__ == "__main__":
    main()
