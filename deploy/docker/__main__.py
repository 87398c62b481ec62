"""`python -m deploy.docker`: both images with their SBOMs, built without a Docker engine; see `--help`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from contextcache.__main__ import PARTS
from deploy.docker.buildah import Buildah, ensure_tools
from deploy.docker.context import Target, make_context
from deploy.docker.sbom import write_sboms
from deploy.local.install import ROOT
from deploy.local.progress import StepFailed, say

FOLDER = ROOT / ".build" / "images"
LOG = ROOT / ".build" / "logs" / "images.log"
BASE = "localhost/context-cache-base:bookworm"
USER = "65532:65532"


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parsed = _parser().parse_args(arguments)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.unlink(missing_ok=True)
    try:
        if parsed.command == "context":
            version = make_context(parsed.folder, Target(parsed.python), log=LOG)
            say(f"version {version}: docker build --build-arg BASE=… --build-arg VERSION={version} {parsed.folder}")
        else:
            build(parsed.base, parsed.vllm_base)
    except StepFailed as failure:
        say(f"error: {failure}")
        return 1
    return 0


def build(base: str, vllm_base: str) -> None:
    """Build the images, try them, and print what they are. Raises StepFailed."""
    ensure_tools(("buildah", *(() if base else ("mmdebstrap",))), log=LOG)
    FOLDER.mkdir(parents=True, exist_ok=True)
    buildah = Buildah(FOLDER / "store", LOG)
    if not base:
        buildah.make_base(BASE, FOLDER / "base.tar")
        base = BASE
    python = buildah.run(base, _VERSION_COMMAND)
    context = FOLDER / "context"
    version = make_context(context, Target(python), log=LOG)
    built = {}
    names = (("context-cache", "Dockerfile", base), ("context-cache-vllm", "Dockerfile.vllm", vllm_base or base))
    for name, dockerfile, its_base in names:
        image = f"localhost/{name}:{version}"
        buildah.build(image, context / dockerfile, arguments={"BASE": its_base, "VERSION": version})
        if name == "context-cache":
            try_parts(buildah, image)
        elif not vllm_base:
            say(
                f"  {image} stands on {its_base}, only to see that it builds; one to use: make images VLLM_BASE=<image>"
            )
            continue
        archive = FOLDER / f"{name}-{version}.oci.tar"
        built[name] = {"image": image, "size_bytes": buildah.archive(image, archive), "archive": archive.name}
        built[name] |= write_sboms(archive, FOLDER / f"{name}-{version}", log=LOG)
    print(json.dumps(built, indent=2))


_VERSION_COMMAND = ("python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")


def try_parts(buildah: Buildah, image: str) -> None:
    """Ask every part for its help as the user it will run as. Raises StepFailed."""
    for part in PARTS:
        buildah.run(image, ("context-cache", part, "--help"), user=USER)
    who = buildah.run(
        image, ("python", "-c", "import os; print(os.getuid(), os.access('/opt/context-cache', os.W_OK))"), user=USER
    )
    if who != "65532 False":
        raise StepFailed(f"{image} runs as {who}; 65532, without rights to write, was meant")
    say(f"  every part of {image} answers --help as user {USER}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.docker", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    images = commands.add_parser("build", help=f"both images and their SBOMs, into {FOLDER}")
    images.add_argument(
        "--base", default="", help="image to stand on, with Python 3.11 or newer; default: a minimal Debian made here"
    )
    images.add_argument("--vllm-base", default="", help="vLLM's image for context-cache-vllm")
    context = commands.add_parser("context", help="only the build context, for another builder")
    context.add_argument("--folder", type=Path, default=FOLDER / "context")
    context.add_argument("--python", default="3.11", help="version of the base image's Python (default 3.11)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
