"""AdmissionReviews: the pod is always allowed, whatever happens, and what is no review is said to be none."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.errors import InvalidRequest
from pod_injector import review as review_module
from pod_injector.review import review
from tests.unit.pod_injector.pods import apply_patch, make_engine, make_parts, make_pod

PARTS = make_parts()


def make_review(pod, **changes):
    request = {
        "uid": "u-1",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "operation": "CREATE",
        "object": pod,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request | changes}


def patched(pod, verdict):
    response = verdict.response()["response"]
    assert (response["uid"], response["allowed"], response["patchType"]) == ("u-1", True, "JSONPatch")
    return apply_patch(pod, json.loads(base64.b64decode(response["patch"])))


def test_a_pod_that_asks_is_injected():
    pod = make_pod()
    verdict = review(make_review(pod), PARTS)

    assert verdict.outcome == "injected"
    assert patched(pod, verdict)["spec"]["initContainers"][1]["name"] == "kv-sidecar"
    assert "warnings" not in verdict.response()["response"]


@pytest.mark.parametrize(
    ("image", "warned"),
    [
        ("vllm/vllm-openai:v0.32.0", False),
        ("vllm/vllm-openai:v0.33.0", True),
        ("registry.example/team/vllm-openai:0.40-cu130@sha256:" + "0" * 64, True),
        ("vllm/vllm-openai:nightly", False),
        ("registry.example/own-image:9.1", False),
    ],
)
def test_a_vllm_newer_than_what_was_tested_is_injected_with_a_warning(image, warned):
    verdict = review(make_review(make_pod(make_engine(image=image, command=["vllm", "serve"], args=["m"]))), PARTS)

    assert verdict.outcome == "injected"
    assert ("newer" in verdict.warning) is warned


def test_a_pod_that_is_injected_already_gets_no_patch():
    pod = make_pod()
    again = review(make_review(patched(pod, review(make_review(pod), PARTS))), PARTS)

    assert again.outcome == "present"
    assert again.response()["response"] == {"uid": "u-1", "allowed": True}


def test_a_pod_that_cannot_be_is_allowed_with_a_warning_and_a_mark():
    pod = make_pod(make_engine(args=["m", "--port", "9000"]))
    verdict = review(make_review(pod), PARTS)

    assert verdict.outcome == "port"
    assert patched(pod, verdict)["spec"] == pod["spec"]
    assert patched(pod, verdict)["metadata"]["annotations"] == {"context-cache.io/inject-skipped": "port"}
    (warning,) = verdict.response()["response"]["warnings"]
    assert "9000" in warning
    assert len(warning) <= 256


def test_a_fault_of_ours_lets_the_pod_start(monkeypatch):
    def fail(*_):
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(review_module, "injection_patch", fail)
    pod = make_pod()
    verdict = review(make_review(pod), PARTS)

    assert verdict.outcome == "fault"
    assert patched(pod, verdict)["spec"] == pod["spec"]


def test_a_pod_without_metadata_gets_one():
    pod = {"spec": {"containers": []}}

    assert review(make_review(pod), PARTS).response()["response"] == {"uid": "u-1", "allowed": True}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"kind": "AdmissionReview"},
        {"kind": "AdmissionReview", "request": []},
        {"kind": "Pod", "request": {"uid": "u"}},
        make_review(make_pod(), uid=""),
        make_review(make_pod(), uid=None),
        make_review(make_pod(), kind={"kind": "Deployment"}),
        make_review(make_pod(), operation="UPDATE"),
        make_review(None),
        make_review({"metadata": {}}),
    ],
)
def test_what_is_no_review_of_a_new_pod_is_refused(body):
    with pytest.raises(InvalidRequest):
        review(body, PARTS)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "args", "env", "value"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["containers", "initContainers", "volumes", "securityContext", "hostNetwork", "os"]), _JSON
    )
)
def test_a_pod_of_any_shape_is_allowed(spec):
    pod = make_pod()
    pod["spec"] |= spec

    assert review(make_review(pod), PARTS).response()["response"]["allowed"] is True
