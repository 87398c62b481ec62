r"""`python -m deploy.chart.package`: package the chart with the registry, tags and digests of our images in its values.

The tree's chart names no registry, because everyone who builds images pushes them elsewhere. A released chart names
them, so that it installs without any setting:

    python -m deploy.chart.package --registry ghcr.io/example \
      --digest context-cache=sha256:… --digest context-cache-vllm=sha256:… --destination dist

The tree stays unchanged. The program prints the path of the package.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from deploy.local.progress import StepFailed, exit_code

CHART = Path(__file__).resolve().parents[2] / "charts" / "context-cache"
IMAGES: Mapping[str, str] = {"context-cache": "image", "context-cache-vllm": "engine.image"}
"""Our images: repository, and the section of the values that describes it."""
_REGISTRY = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?(?:/[a-z0-9][a-z0-9._-]*)*")
_DIGEST = re.compile(r"sha256:[a-f0-9]{64}")
_HELM_S = 120


def package(registry: str, digests: Mapping[str, str], destination: Path, *, helm: str = "helm") -> Path:
    """Package the chart and return the archive's path. Raises StepFailed."""
    if not _REGISTRY.fullmatch(registry):
        raise StepFailed(f"--registry must be a host with an optional path, such as ghcr.io/example; got {registry!r}")
    if digests.keys() != IMAGES.keys():
        raise StepFailed(f"--digest is needed once for each of {', '.join(IMAGES)}; got {', '.join(digests) or 'none'}")
    for image, digest in digests.items():
        if not _DIGEST.fullmatch(digest):
            raise StepFailed(f"--digest {image}: must be sha256: and 64 hexadecimal digits; got {digest!r}")
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        chart = Path(shutil.copytree(CHART, Path(scratch) / CHART.name))
        version = str(yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"])
        _write_values(chart / "values.yaml", registry, digests, version)
        _write_image_list(chart / "Chart.yaml", registry, digests, version)
        command = [helm, "package", str(chart), "--destination", str(destination)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_HELM_S, check=False)
        if done.returncode != 0:
            raise StepFailed(f"helm package: {(done.stderr or done.stdout).strip()}")
    return destination / f"{CHART.name}-{version}.tgz"


def _write_values(file: Path, registry: str, digests: Mapping[str, str], version: str) -> None:
    """Write registry, tag and digest of each image over the defaults; comments stay."""
    text = file.read_text()
    wanted = {
        f"{section}.{key}": value
        for image, section in IMAGES.items()
        for key, value in (("registry", registry), ("tag", version), ("digest", digests[image]))
    }
    places = {path: _scalar(text, path) for path in wanted}
    for path, (start, end) in sorted(places.items(), key=lambda place: place[1], reverse=True):
        text = f"{text[:start]}{json.dumps(wanted[path])}{text[end:]}"
    file.write_text(text)


def _scalar(text: str, path: str) -> tuple[int, int]:
    """Return where the value of a dotted path stands in a text of YAML."""
    node = yaml.compose(text)
    for name in path.split("."):
        assert isinstance(node, yaml.MappingNode), f"{path} is no path of values.yaml"
        node = next(value for key, value in node.value if key.value == name)
    assert isinstance(node, yaml.ScalarNode), f"{path} is no single value"
    return node.start_mark.index, node.end_mark.index


def _write_image_list(file: Path, registry: str, digests: Mapping[str, str], version: str) -> None:
    """Write our images into the annotation that lists the images to mirror."""
    text = file.read_text()
    for image, digest in digests.items():
        text, found = re.subn(
            rf"image: {re.escape(image)}:{re.escape(version)}$",
            f"image: {registry}/{image}@{digest}",
            text,
            flags=re.MULTILINE,
        )
        if found != 1:
            raise StepFailed(
                f"Chart.yaml: artifacthub.io/images must list {image}:{version} once; it does {found} times"
            )
    file.write_text(text)


@exit_code
def main(arguments: list[str] | None = None) -> None:
    """Package the chart and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.chart.package", description=__doc__.split("\n")[0])
    parser.add_argument("--registry", required=True, help="registry of our images, with its path: ghcr.io/example")
    parser.add_argument("--digest", action="append", default=[], metavar="IMAGE=sha256:…", help="digest of an image")
    parser.add_argument("--destination", type=Path, default=Path("dist"), help="folder for the package (default: dist)")
    parser.add_argument("--helm", default="helm", help="the Helm program (default: helm on PATH)")
    given = parser.parse_args(arguments)
    digests = {image: digest for image, _, digest in (one.partition("=") for one in given.digest)}
    print(package(given.registry.lower(), digests, given.destination, helm=given.helm))


if __name__ == "__main__":
    sys.exit(main())
