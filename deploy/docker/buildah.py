"""buildah, the way it works without rights to namespaces or a daemon: chroot isolation, plain copies as layers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.local.progress import StepFailed, run_logged

_TOOLS = {"buildah": "builds images", "mmdebstrap": "makes a small Debian to build on"}


def ensure_tools(names: Sequence[str], *, log: Path) -> None:
    """Install what is missing where that can be done (root on a Debian), else raise StepFailed with the command."""
    missing = [name for name in names if shutil.which(name) is None]
    if not missing:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        purposes = "; ".join(f"{name} {_TOOLS[name]}" for name in missing)
        raise StepFailed(f"missing: {purposes}. On Debian and Ubuntu: sudo {' '.join(command)}")
    env = dict(os.environ) | {"DEBIAN_FRONTEND": "noninteractive"}
    run_logged(["apt-get", "update"], what="package lists", log=log, env=env)
    run_logged(command, what=" and ".join(missing), log=log, env=env)


@dataclass(frozen=True, slots=True)
class Buildah:
    """One store of images under a folder of ours."""

    store: Path
    log: Path

    def make_base(self, name: str, archive: Path) -> None:
        """Make an image out of a minimal Debian with Python, built by mmdebstrap. Raises StepFailed."""
        if not archive.exists():
            archive.parent.mkdir(parents=True, exist_ok=True)
            half = archive.with_suffix(".part.tar")
            include = "--include=python3,python3-venv,ca-certificates"
            command = ["mmdebstrap", "--variant=minbase", include, "bookworm", str(half)]
            run_logged(command, what="a minimal Debian", log=self.log)
            half.rename(archive)
        container = self._output("from", "scratch")
        try:
            self._logged("add", container, str(archive), "/", what="base image")
            self._logged("commit", container, name, what="base image, committed")
        finally:
            self._output("rm", container)

    def build(self, name: str, dockerfile: Path, *, arguments: Mapping[str, str]) -> None:
        """Build one Dockerfile; its folder is the context. Raises StepFailed."""
        given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        options = ["--isolation", "chroot", "--format", "docker", "--layers=false", "--tag", name, *given]
        self._logged("bud", *options, "--file", str(dockerfile), str(dockerfile.parent), what=f"image {name}")
        self._output("rmi", "--prune")  # layers of the image that had this name before

    def run(self, name: str, command: Sequence[str], *, user: str = "") -> str:
        """Run a command in a container of an image and return what it prints. Raises StepFailed."""
        container = self._output("from", "--pull-never", name)
        try:
            who = ("--user", user) if user else ()
            return self._output("run", "--isolation", "chroot", *who, container, "--", *command)
        finally:
            self._output("rm", container)

    def archive(self, name: str, path: Path) -> int:
        """Write an image as an OCI archive that any engine loads, and return its size in bytes. Raises StepFailed."""
        path.unlink(missing_ok=True)
        self._logged("push", name, f"oci-archive:{path}:{name}", what=f"archive of {name}")
        return path.stat().st_size

    def _command(self, *words: str) -> list[str]:
        run = self.store.with_name("run")
        return ["buildah", "--storage-driver", "vfs", "--root", str(self.store), "--runroot", str(run), *words]

    def _logged(self, *words: str, what: str) -> None:
        run_logged(self._command(*words), what=what, log=self.log)

    def _output(self, *words: str) -> str:
        result = subprocess.run(self._command(*words), capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise StepFailed(f"buildah {words[0]} failed: {result.stderr.strip()[-500:]}")
        return result.stdout.strip()
