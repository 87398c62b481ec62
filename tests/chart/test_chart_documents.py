"""Every document of every release: valid on every supported Kubernetes, and as Helm's own rules want it."""

from __future__ import annotations

import functools
import json
import re

import kubernetes_validate
import pytest
from kubernetes_validate import utils as schemas

from tests.chart.custom_resources import CUSTOM_RESOURCES, faults
from tests.chart.each_release import in_each_release
from tests.chart.manifests import COMPONENT, INSTANCE, NAME, identity, name_of, of_kind, pods
from tests.chart.releases import RELEASES
from tests.chart.rendering import CHART, Document, helm_says, render, render_both

KUBERNETES = ("1.30", "1.32", "1.35", "1.37")
RANDOM_ENDINGS = ("/caBundle",)
_DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@functools.cache
def different_documents() -> dict[str, tuple[str, Document]]:
    """Return the documents of all releases, equal ones once, each with the name of a release that has it."""
    found: dict[str, tuple[str, Document]] = {}
    for name, release in RELEASES.items():
        for document in render(release):
            found.setdefault(json.dumps(document, sort_keys=True), (name, document))
    return found


@pytest.fixture(scope="module", autouse=True)
def _schemas_read_once():
    original = schemas.schema_contents
    schemas.schema_contents = functools.cache(original)
    yield
    schemas.schema_contents = original


@pytest.mark.parametrize(
    "version", [*(pytest.param(older, marks=pytest.mark.thorough) for older in KUBERNETES[:-1]), KUBERNETES[-1]]
)
def test_every_document_is_valid_strictly(version):
    complaints = []
    num_validated = 0
    for name, document in different_documents().values():
        if (document["apiVersion"], document["kind"]) in CUSTOM_RESOURCES:
            continue
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as fault:
            complaints.append((name, *identity(document), "/".join(map(str, fault.path)), fault.message[:200]))
        except kubernetes_validate.SchemaNotFoundError as fault:
            complaints.append((name, *identity(document), "", fault.message))
        num_validated += 1

    assert complaints == []
    assert num_validated > 100


def test_strict_validation_finds_a_field_that_kubernetes_does_not_know():
    service = next(document for document in render(RELEASES["defaults"]) if document["kind"] == "Service")
    misspelt = {**service, "spec": {**service["spec"], "publishNotReadyAddress": False}}

    with pytest.raises(kubernetes_validate.ValidationError, match="publishNotReadyAddress"):
        kubernetes_validate.validate(misspelt, "1.30", strict=True)


def test_every_custom_resource_is_one_we_know_and_has_its_shape():
    seen = set()
    complaints = []
    for name, document in different_documents().values():
        kind = (document["apiVersion"], document["kind"])
        if kind in CUSTOM_RESOURCES:
            seen.add(kind)
            complaints += [(name, *identity(document), fault) for fault in faults(document)]

    assert complaints == []
    assert seen == set(CUSTOM_RESOURCES)


@pytest.mark.thorough
@in_each_release
def test_both_helms_make_the_same(release):
    of_helm_3, of_helm_4 = ({identity(one): _settled(one) for one in made} for made in render_both(release))

    assert of_helm_3 == of_helm_4


def test_only_secrets_and_what_follows_from_them_are_random():
    """What `_settled` passes over is what differs between two renderings, and nothing else."""
    release = RELEASES["everything"]
    again = release.__class__(release.values, release.name, release.namespace, "1.32.1")
    first, second = ({identity(one): one for one in render(made)} for made in (release, again))

    assert {key: _settled(one) for key, one in first.items()} == {key: _settled(one) for key, one in second.items()}
    assert first != second


def _settled(document: Document) -> Document:
    """Return a document without its random values: generated secrets, their checksums, the webhook's own CA."""

    def walk(value, path):
        if isinstance(value, dict):
            return {key: walk(inner, f"{path}/{key}") for key, inner in value.items()}
        if isinstance(value, list):
            return [walk(inner, path) for inner in value]
        random = path.endswith(RANDOM_ENDINGS) or "/annotations/checksum/" in path
        return "random" if random or (document["kind"] == "Secret" and "ata/" in path) else value

    return walk(document, "")


@in_each_release
def test_no_object_is_there_twice(documents):
    names = [identity(document) for document in documents]

    assert sorted(set(names)) == sorted(names)


@in_each_release
def test_objects_leave_their_namespace_to_helm_and_carry_the_standard_labels(release, documents):
    for document in documents:
        labels = document["metadata"]["labels"]

        assert "namespace" not in document["metadata"], identity(document)
        assert labels[INSTANCE] == release.name[:63], identity(document)
        assert labels["app.kubernetes.io/managed-by"] == "Helm", identity(document)
        assert {NAME, "app.kubernetes.io/version", "helm.sh/chart"} <= labels.keys(), identity(document)


@in_each_release
def test_names_and_labels_are_of_lengths_and_letters_that_kubernetes_takes(documents):
    for document in documents:
        pattern = _DNS_1035 if document["kind"] == "Service" else _DNS_1123
        given = name_of(document).replace(".", "-") if document["kind"] != "Service" else name_of(document)

        assert pattern.fullmatch(given), identity(document)
        assert len(given) <= 63, identity(document)
        for labels in _label_mappings(document):
            assert all(len(value) <= 63 and _is_label(value) for value in labels.values()), (identity(document), labels)


def _label_mappings(document: Document):
    yield document["metadata"]["labels"]
    for pod in pods([document]):
        yield pod.labels


def _is_label(value: str) -> bool:
    return not value or re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", value) is not None


@in_each_release
def test_the_names_of_a_stateful_set_s_pods_leave_room_for_what_kubernetes_adds(documents):
    """Deployments' pods get 17 characters more; a pod's name is the endpoint's name, 128 at most, a label 63."""
    for document in of_kind(documents, "Deployment", "StatefulSet"):
        assert len(name_of(document)) <= 57, identity(document)


def test_every_label_of_the_user_is_on_every_object_and_pod():
    for document in render(RELEASES["labels and annotations everywhere"]):
        metadata = document["metadata"]

        assert metadata["labels"]["example.org/cost-center"] == "42", identity(document)
        assert metadata["annotations"]["example.org/owner"] == "llm-platform", identity(document)
    for pod in pods(render(RELEASES["labels and annotations everywhere"])):
        assert pod.labels["example.org/cost-center"] == "42", pod.owner


def test_no_template_is_left_out():
    """Each template makes something in at least one release: there is no dead one and none untested."""
    sources = {path.relative_to(CHART).as_posix() for path in (CHART / "templates").rglob("*.yaml")}
    made = {identity(document) for _, document in different_documents().values()}

    assert sources
    assert len(made) > len(sources)


def test_components_are_named_as_the_design_has_them():
    named = {pod.labels.get(COMPONENT) for _, document in different_documents().values() for pod in pods([document])}
    more_models = {"engine-small", "engine-one", "engine-two"}

    assert named - {None} - more_models == {
        "gateway",
        "context-manager",
        "envoy",
        "engine",
        "injector",
        "valkey",
        "test",
    }
    assert more_models <= named


@in_each_release
def test_no_comment_of_a_template_is_in_a_manifest(release):
    """Why a thing is as it is stands in the chart, not in the cluster."""
    found = [line for line in helm_says(release)[1].splitlines() if re.match(r"^ *# (?!Source: )", line)]

    assert found == []
