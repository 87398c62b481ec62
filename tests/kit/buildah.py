"""buildah, the way it works without rights to namespaces or a daemon: chroot isolation, plain copies as layers."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("buildah", "mmdebstrap")


def missing_programs() -> list[str]:
    """Install what is missing where that can be done, as root on a Debian; return what is missing then."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        env = dict(os.environ) | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            subprocess.run(["apt-get", "-q", *words], env=env, check=True, capture_output=True, timeout=600)
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass(frozen=True, slots=True)
class Buildah:
    """One store of images under a folder."""

    folder: Path

    def make_base(self, name: str) -> None:
        """Make an image of a minimal Debian with Python out of Debian's packages: there may be no registry here."""
        archive = self.folder / "base.tar"
        include = "--include=python3,python3-venv,ca-certificates"
        command = ["mmdebstrap", "--variant=minbase", include, "bookworm", str(archive)]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        container = self("from", "scratch")
        self("add", container, str(archive), "/")
        self("commit", "--rm", container, name)
        archive.unlink()

    def build(self, name: str, dockerfile: Path, context: Path, **arguments: str) -> None:
        """Build a Dockerfile as it is, with the package index and the certificates that this machine's pip uses."""
        conf = self.folder / "pip.conf"
        conf.write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n" + _index())
        bundle = "/etc/ssl/certs/ca-certificates.crt"
        options = ["--isolation", "chroot", "--format", "docker", "--layers=false", "--tag", name]
        options += ["--secret", f"id=pip.conf,src={conf}", "--volume", f"{bundle}:{bundle}:ro"]
        options += [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        self("build", *options, "--file", str(dockerfile), str(context))

    def run(self, image: str, *command: str, user: str) -> str:
        """Run a command in a container of an image and return what it prints."""
        container = self("from", "--pull-never", image)
        try:
            return self("run", "--isolation", "chroot", "--user", user, container, "--", *command)
        finally:
            self("rm", container)

    def __call__(self, *words: str) -> str:
        """Run one command of buildah; return its output. Raises AssertionError with what it said."""
        storage = [
            "--storage-driver",
            "vfs",
            "--root",
            str(self.folder / "store"),
            "--runroot",
            str(self.folder / "run"),
        ]
        done = subprocess.run(["buildah", *storage, *words], capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0, f"buildah {words[0]}: {(done.stdout + done.stderr)[-3000:]}"
        return done.stdout.strip()


def _index() -> str:
    told = subprocess.run(["pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False)
    return f"index-url = {told.stdout.strip()}\n" if told.returncode == 0 else ""
