"""What differs between stacks, and where it comes from: what was asked for, else the last start, else the defaults.

Only what `settings.json` can hold, so that a part can be started again, by whoever, as it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from deploy.local.model import MODEL_DIR
from deploy.local.paths import StackPaths
from deploy.local.ports import DEFAULT_PORT, PortPlan, plan_ports


class StackSettings(BaseModel):
    """One stack: where it lives and what differs between stacks."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    paths: StackPaths = Field(exclude=True)
    model_dir: Path = MODEL_DIR
    port: int = DEFAULT_PORT
    dtype: str = "bfloat16"
    """`float32` makes cold and restored answers comparable to the last digit, at twice the memory."""
    engines: int = 1
    """vLLM processes, each with its sidecar and its turn process."""
    dev: bool = False
    """True: vLLM's development routes (`/reset_prefix_cache`) are on."""
    engine_args: tuple[str, ...] = ()
    """Appended to vLLM's command line."""
    env: Mapping[str, str] = {}
    """Laid over every part's environment; the prefixes keep parts apart."""
    connector: Mapping[str, Any] = {}
    """More of the connector's `kv_connector_extra_config`."""
    store: str = ""
    """What the sidecars share: `dir`, a directory; `s3`, an S3 server that the stack starts; empty: nothing."""

    @property
    def ports(self) -> PortPlan:
        """The ports that follow from `port`."""
        return plan_ports(self.port)

    def environment(
        self, own: Mapping[str, str] | None = None, *, defaults: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Return a part's environment: `defaults`, the caller's, `own` (addresses, files, secrets), the stack's."""
        base = {"PYTHONUNBUFFERED": "1", **(defaults or {})}
        return base | dict(os.environ) | {"TMPDIR": str(self.paths.scratch), **(own or {})} | dict(self.env)
