"""The webhook's decision about the pods of a manifest, before the manifest is applied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pod_injector.parts import default_parts
from pod_injector.pod_patch import injection_patch
from pod_injector.preview import BYTES_MAX, UnreadableManifest, pod_templates, previews
from tests.unit.pod_injector.pods import apply_patch, make_engine, make_pod

THEIRS = Path(__file__).with_name("theirs")
LABELS = {"app": "llama", "context-cache.io/inject": "true"}
PARTS = default_parts()


def deployment(spec=None, *, labels=None, kind="Deployment", **metadata):
    template = {"metadata": {"labels": LABELS if labels is None else labels}, "spec": spec or make_pod()["spec"]}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "llama"} | metadata,
        "spec": {"template": template},
    }


def seen(*documents, **options):
    return [*previews(yaml.safe_dump_all(documents).encode(), PARTS, **options)]


def theirs(name):
    return yaml.safe_load((THEIRS / f"{name}.yaml").read_text())


def test_a_plain_vllm_deployment_would_be_injected_by_the_webhooks_own_patch():
    [preview] = seen(deployment())
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": LABELS}, "spec": make_pod()["spec"]}

    assert (preview.owner, preview.outcome, preview.text) == ("Deployment/llama", "injected", "would be injected")
    assert preview.patch == injection_patch(pod, PARTS)
    assert apply_patch(pod, preview.patch)["spec"]["initContainers"][1]["name"] == "kv-sidecar"


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("production-stack", "injected"),
        ("kserve-llminferenceservice", "user"),
        ("llm-d-decode", "kv-connector"),
    ],
)
def test_pods_as_others_make_them_are_judged_as_by_the_webhook(name, outcome):
    [preview] = seen(deployment(theirs(name)))

    assert preview.outcome == outcome
    assert preview.is_injected is (outcome == "injected")
    assert (preview.patch != []) is preview.is_injected


def test_a_bare_pod_spec_in_a_custom_resource_has_the_resource_s_labels():
    kserve = {
        "kind": "LLMInferenceService",
        "metadata": {"name": "llama", "labels": LABELS},
        "spec": {"template": theirs("kserve-llminferenceservice")},
    }
    [preview] = seen(kserve)

    assert (preview.owner, preview.outcome) == ("LLMInferenceService/llama", "user")


def test_kserves_preset_with_a_user_is_injected_and_the_rest_is_known_when_vllm_starts():
    spec = theirs("kserve-llminferenceservice") | {"securityContext": {"runAsUser": 2000}}
    [preview] = seen(deployment(spec))

    assert (preview.outcome, preview.warns) == ("injected", True)
    assert "port and KV connector are checked when vLLM starts" in preview.text


def test_without_the_label_the_pod_is_left_alone_and_the_text_says_what_the_label_would_do():
    bare = deployment(labels={"app": "llama", "context-cache.io/inject": "yes"})
    other = deployment({"containers": [make_engine(args=["--model", "m", "--port", "9000"])]}, labels={})
    found = seen(bare, other)

    assert [preview.outcome for preview in found] == ["opted-out", "opted-out"]
    assert 'no label context-cache.io/inject: "true"' in found[0].text
    assert found[0].with_label == "would be injected"
    assert found[1].with_label.startswith("not injected (port)")


def test_pods_of_another_release_or_another_namespace_are_not_taken():
    labels = LABELS | {"context-cache.io/engines": "blue"}
    found = seen(deployment(labels=labels), deployment(namespace="elsewhere"), deployment(), namespace="llm")

    assert [preview.outcome for preview in found] == ["other-release", "other-namespace", "injected"]
    assert "llm" in found[1].text
    assert "elsewhere" in found[1].text


def test_every_kind_of_object_that_holds_pods_is_read_and_the_rest_is_passed_over():
    cron = {"kind": "CronJob", "metadata": {"name": "c"}, "spec": {"jobTemplate": deployment()}}
    group = {"kind": "LeaderWorkerSet", "metadata": {"generateName": "g-"}}
    group["spec"] = {
        "leaderWorkerTemplate": {
            part: deployment()["spec"]["template"] for part in ("leaderTemplate", "workerTemplate")
        }
    }
    service = {"kind": "Service", "metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}}
    found = seen(
        service, None, make_pod(), cron, group, {"kind": "List", "items": [deployment(kind="StatefulSet"), service]}
    )

    assert [preview.owner for preview in found] == [
        "Pod/llama-",
        "CronJob/c",
        "LeaderWorkerSet/g-",
        "LeaderWorkerSet/g-",
        "StatefulSet/llama",
    ]
    assert {preview.outcome for preview in found} == {"injected"}


def test_a_newer_vllm_is_injected_with_the_webhooks_warning():
    [preview] = seen(deployment({"containers": [make_engine(image="vllm/vllm-openai:v0.99.0")]}))

    assert preview.is_injected
    assert preview.warns
    assert "vLLM 0.99" in preview.text


def bomb():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    return "\n".join(lines)


def merge_bomb():
    lines = ["a0: &a0 {k: v}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 10)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(), "aliases"),
        (merge_bomb(), "aliases"),
        ("a: &a [*a]", "aliases"),
        ("kind: Deployment\nspec:\n\ttemplate: {}", "line 3, column 1"),
        ("- kind: Pod", "document 1 is a list"),
        ("kind: Pod\n---\njust words", "document 2 is a str"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.system [true]", "not YAML"),
        ("a: !!binary aGk=", "not YAML"),
        ("? [1, 2]\n: x", "not YAML"),
        ("a: *nowhere", "undefined alias"),
        ("[" * 5000, "nested too deeply"),
        ("a: " + "9" * 5000, "not YAML"),
        ("a: \x01", "not YAML"),
        (b"a: \xff\xfe", "not YAML"),
        ("#" * (BYTES_MAX + 1), "larger than 1 MiB"),
    ],
    ids=lambda value: None if len(value) > 30 else str(value),
)
def test_hostile_yaml_is_refused_with_a_sentence(text, message):
    with pytest.raises(UnreadableManifest, match=message):
        pod_templates(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    "template",
    [
        {"metadata": [], "spec": {"containers": [make_engine()]}},
        {"metadata": {"labels": "x"}, "spec": {"containers": [make_engine()]}},
        {"metadata": {"labels": LABELS, "annotations": 3}, "spec": {"containers": [make_engine()]}},
        {"metadata": {"labels": LABELS}, "spec": {"containers": ["vllm"]}},
        {"metadata": {"labels": LABELS}, "spec": {"containers": [make_engine(args=7)]}},
        {"metadata": {"labels": LABELS}, "spec": {"containers": [make_engine(env=[{"value": "x"}])]}},
        {"metadata": {"labels": LABELS}, "spec": {"containers": [make_engine()], "volumes": [3]}},
    ],
)
def test_a_template_that_no_api_server_takes_is_a_fault_and_no_traceback(template):
    [preview] = seen({"kind": "Deployment", "metadata": {"name": "x"}, "spec": {"template": template}})

    assert not preview.is_injected
    assert preview.outcome in {"fault", "opted-out"}


def test_a_date_stays_a_text_and_an_alias_is_a_copy():
    text = """
kind: Pod
metadata: {name: x, annotations: {made: 2026-11-28}, labels: &labels {context-cache.io/inject: "true"}}
spec: {containers: [{name: vllm, image: vllm/vllm-openai:v0.32.0, args: [m]}], nodeSelector: *labels}
"""
    [template] = pod_templates(text.encode())

    assert template.pod["metadata"]["annotations"] == {"made": "2026-11-28"}
    assert json.dumps(template.pod)
    assert template.pod["spec"]["nodeSelector"] is not template.pod["metadata"]["labels"]
