"""A packaged chart names registry and digest of each image of ours, and needs no value to be pulled."""

from __future__ import annotations

import json
import tarfile

import pytest
import yaml

from deploy.chart.package import IMAGES, main, package
from deploy.local.progress import StepFailed
from tests.chart.manifests import pods
from tests.chart.releases import ENGINE, INJECTOR, REDIS, merged
from tests.chart.rendering import CHART, documents, helm_program, run_helm

DIGESTS = {"context-cache": "sha256:" + "1" * 64, "context-cache-vllm": "sha256:" + "2" * 64}
OURS = {f"ghcr.io/example/{image}@{digest}" for image, digest in DIGESTS.items()}
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]


@pytest.fixture
def packaged(helm, tmp_path):
    return package("ghcr.io/example", DIGESTS, tmp_path / "dist", helm=str(helm_program(helm)))


def rendering(helm, archive, values=None) -> list[dict]:
    """Render an archive with values alone, without the registry that other tests set."""
    path = archive.parent / "values.json"
    path.write_text(json.dumps(merged(REDIS, ENGINE, INJECTOR, values or {})))
    done = run_helm(helm, "template", "cc", str(archive), "--kube-version", "1.32.0", "--values", str(path))
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def images(made: list[dict]) -> set[str]:
    """Return the images of all containers, and of those that the injector adds."""
    parts = next(
        one["data"]["parts.json"] for one in made if one["kind"] == "ConfigMap" and "parts.json" in one["data"]
    )
    injected = {container["image"] for container in _containers(json.loads(parts))}
    return {container["image"] for pod in pods(made) for container in pod.containers} | injected


def _containers(node):
    if isinstance(node, dict):
        yield from [node] if "image" in node else []
        node = list(node.values())
    for inner in node if isinstance(node, list) else []:
        yield from _containers(inner)


def test_each_image_of_ours_has_the_registry_and_the_digest_of_the_release(helm, packaged):
    found = images(rendering(helm, packaged))

    assert {image for image in found if "@" in image} == OURS
    assert {image.partition("/")[0] for image in found} == {"ghcr.io", "docker.io"}


def test_the_packaged_values_and_image_list_name_them_and_the_tree_stays_as_it_was(helm, packaged):
    with tarfile.open(packaged) as archive:
        values = yaml.safe_load(archive.extractfile("context-cache/values.yaml").read())
        comments = archive.extractfile("context-cache/values.yaml").read().decode().count("# -- ")
        chart = yaml.safe_load(archive.extractfile("context-cache/Chart.yaml").read())
    assert packaged.name == f"context-cache-{VERSION}.tgz"
    assert (values["image"]["registry"], values["engine"]["image"]["registry"]) == ("ghcr.io/example",) * 2
    assert (values["image"]["tag"], values["engine"]["image"]["tag"]) == (VERSION, VERSION)
    assert comments == (CHART / "values.yaml").read_text().count("# -- ")
    listed = {one["image"] for one in yaml.safe_load(chart["annotations"]["artifacthub.io/images"])}
    assert {image for image in listed if "@" in image} == OURS
    assert len(listed) == 4
    assert yaml.safe_load((CHART / "values.yaml").read_text())["image"]["registry"] == ""


def test_a_mirror_keeps_the_digests_and_an_image_of_ones_own_takes_them_out(helm, packaged):
    mirror = "registry.example.org/mirror"
    at_mirror = {"image": {"registry": mirror}, "engine": {"image": {"registry": mirror}}}
    own = merged(at_mirror, {"image": {"digest": "", "tag": "mine"}})

    assert f"{mirror}/context-cache@{DIGESTS['context-cache']}" in images(rendering(helm, packaged, at_mirror))
    assert f"{mirror}/context-cache:mine" in images(rendering(helm, packaged, own))


@pytest.mark.parametrize(
    ("registry", "digests", "says"),
    [
        ("", DIGESTS, "--registry must be a host"),
        ("https://ghcr.io/example", DIGESTS, "--registry must be a host"),
        ("ghcr.io/example/", DIGESTS, "--registry must be a host"),
        ("ghcr.io/example", {"context-cache": DIGESTS["context-cache"]}, "context-cache-vllm"),
        ("ghcr.io/example", {**DIGESTS, "context-cache": "0.1.0"}, "--digest context-cache: must be sha256:"),
    ],
)
def test_a_package_that_could_not_be_pulled_is_not_made(tmp_path, registry, digests, says):
    with pytest.raises(StepFailed, match=says):
        package(registry, digests, tmp_path / "dist")

    assert not (tmp_path / "dist").exists()


def test_the_command_prints_the_package(helm, tmp_path, capsys):
    digests = [word for image in IMAGES for word in ("--digest", f"{image}={DIGESTS[image]}")]
    program = ["--helm", str(helm_program(helm)), "--destination", str(tmp_path)]

    assert main(["--registry", "ghcr.io/Example", *digests, *program]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / f"context-cache-{VERSION}.tgz")
    assert main(["--registry", "ghcr.io/example", *program]) == 1
