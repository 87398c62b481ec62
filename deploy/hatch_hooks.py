"""Parts of both distributions that no pyproject.toml can hold. hatchling loads it, so it needs hatchling alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SERVER = "context-cache-server"
SERVER_PACKAGES = ("gateway", "context_manager", "kv_sidecar", "vllm_plugin", "integrations", "pod_injector")


class ProjectMetadata(MetadataHookInterface):
    """Fills in the fields that a pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `urls` where a GitHub workflow builds, none elsewhere; to the server, the client of its version."""
        metadata["urls"] = _urls()
        if metadata["name"] == SERVER:
            metadata["dependencies"] = [f"context-cache[parts]=={metadata['version']}"]


class ServerPackages(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own use has none
    """Puts the packages into the server's wheel: folders of the repository, outside of the project's directory."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add them to a wheel. An editable one has the repository on its path and needs no copy."""
        if version != "editable":
            root = Path(self.root, "..", "..")
            build_data["force_include"].update({str(root / name): name for name in SERVER_PACKAGES})


def _urls() -> dict[str, str]:
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if not server or not repository:
        return {}
    home = f"{server}/{repository}"
    return {"Source": home, "Issues": f"{home}/issues", "Changelog": f"{home}/blob/main/CHANGELOG.md"}
