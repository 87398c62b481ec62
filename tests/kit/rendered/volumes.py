"""The volumes of a pod as folders."""

from __future__ import annotations

import base64
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.chart.manifests import name_of
from tests.chart.rendering import Document
from tests.kit.rendered.substitutions import Substitutions

Spec = Mapping[str, Any]
_SHARED_MEMORY = Path("/dev/shm")
_SHARED = {"emptyDir", "ephemeral", "persistentVolumeClaim", "hostPath"}
_FILES = {"secret": "secretName", "configMap": "name"}


class Objects:
    """Secrets and ConfigMaps: the release's, and those its values name."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._found = {(made["kind"], name_of(made)): made for made in documents}

    def content(self, kind: str, name: str) -> dict[str, bytes]:
        """Return the keys of one; it must be there, or the pod would not start."""
        made = self._found[kind, name]
        plain = {key: value.encode() for key, value in (made.get("stringData") or {}).items()}
        if kind == "ConfigMap":
            return plain | {key: value.encode() for key, value in (made.get("data") or {}).items()}
        return plain | {key: base64.b64decode(value) for key, value in (made.get("data") or {}).items()}

    def value(self, kind: str, name: str, key: str) -> str:
        """Return one key."""
        return self.content(kind, name)[key].decode()


class Volumes:
    """The volumes of one pod: `own` are folders of what it claims by its StatefulSet, `claims` of those with a name.

    A node's directory is the folder of that path: what a test puts there it can find again.
    """

    def __init__(
        self, spec: Spec, own: Mapping[str, Path], objects: Objects, folder: Path, claims: Mapping[str, Path]
    ) -> None:
        self._volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        self._own = own
        self._objects = objects
        self._folder = folder
        self._claims = claims
        self._memory: dict[str, Path] = {}

    def mounts(self, container: Spec) -> dict[str, Path]:
        """Return mount paths and their folders; those of files are empty until `fill`."""
        return {mount["mountPath"]: self._mounted(container, mount) for mount in container.get("volumeMounts", [])}

    def fill(self, container: Spec, change: Substitutions) -> None:
        """Write the files of mounted Secrets and ConfigMaps."""
        for mount in container.get("volumeMounts", []):
            volume = self._volumes.get(mount["name"], {})
            for kind, key in _FILES.items():
                if kind in volume:
                    self._write(self._mounted(container, mount), kind, volume[kind], volume[kind][key], change)

    def remove(self) -> None:
        """Give the shared memory back."""
        for folder in self._memory.values():
            shutil.rmtree(folder, ignore_errors=True)

    def _mounted(self, container: Spec, mount: Spec) -> Path:
        assert set(mount) <= {"name", "mountPath", "readOnly"}, mount
        name = mount["name"]
        volume = self._volumes.get(name, {})
        if name in self._own:
            folder = self._own[name]
        elif node := volume.get("hostPath"):
            folder = Path(node["path"])
        elif claim := volume.get("persistentVolumeClaim"):
            folder = self._claims[claim["claimName"]]
        elif (volume.get("emptyDir") or {}).get("medium") == "Memory":
            folder = self._in_memory(name)
        elif volume.keys() & _SHARED:
            folder = self._folder / name
        else:
            assert volume.keys() & _FILES.keys(), f"no volume of a kind we know: {mount} of {volume}"
            folder = self._folder / container["name"] / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _in_memory(self, name: str) -> Path:
        if name not in self._memory:
            self._memory[name] = Path(tempfile.mkdtemp(prefix="cc-rendered-", dir=_SHARED_MEMORY))
        return self._memory[name]

    def _write(self, folder: Path, kind: str, volume: Spec, name: str, change: Substitutions) -> None:
        content = self._objects.content({"secret": "Secret", "configMap": "ConfigMap"}[kind], name)
        items = volume.get("items") or [{"key": key, "path": key} for key in content]
        for item in items:
            file = folder / item["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(change.file(content[item["key"]]))
