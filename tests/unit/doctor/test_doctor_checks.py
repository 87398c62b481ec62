"""Each check: silent where all is well, and seen to fail where something is not."""

from __future__ import annotations

import ssl

import httpx
import pytest

from contextcache.doctor import access_checks, engine_checks, examination, part_checks, tls_check
from contextcache.doctor.examination import Plan, examine
from contextcache.doctor.finding import Level
from contextcache.doctor.front import Unreachable
from contextcache.doctor.story import story
from tests.unit.doctor.deployment import KEY, NOW_S, POD, RECEIPTS, SESSION, Deployment, error, usage

COMPLETIONS = ("POST", "/v1/completions")
CONTEXT = ("POST", "/v1/context")


@pytest.fixture
def deployment():
    return Deployment()


def levels(findings):
    return {finding.check: finding.level.value for finding in findings}


def one(findings, check):
    (found,) = [finding for finding in findings if finding.check == check]
    return found


def readyz(deployment, *, missing=(), **pods):
    found = {"ready": not missing, "missing": list(missing), "endpoints": pods}
    deployment.answers["GET", "/readyz"] = (503 if missing else 200, found)


CHECKS = {
    "reach": access_checks.reach,
    "clock": lambda front: access_checks.clock(front, now_s=lambda: NOW_S),
    "ready": access_checks.ready,
    "details": part_checks.details,
    "keys": access_checks.keys,
    "isolation": access_checks.isolation,
    "forged headers": lambda front: access_checks.forged_headers(front, "m"),
    "models": lambda front: engine_checks.models(front, ""),
    "versions": lambda front: engine_checks.versions(front, "0.1.0"),
    "metrics": part_checks.gateway,
    "story": lambda front: story(front, "m"),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_deployment_that_is_well_has_no_complaint(deployment, check):
    findings = list(check(deployment.front()))

    assert findings
    assert set(levels(findings).values()) == {"ok"}, findings
    assert not [finding.hint for finding in findings if finding.hint]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((503, "no healthy upstream"), "but no gateway"),
        ((404, "<html>"), "not from context-cache"),
        ((301, ""), "not from context-cache"),
    ],
)
def test_a_front_that_is_not_ours_or_alone_is_told(deployment, answer, words):
    deployment.answers["GET", "/healthz"] = answer
    found = one(access_checks.reach(deployment.front()), "reach")

    assert found.level is Level.FAILED
    assert words in found.hint


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectError("[Errno 111] Connection refused"), "no process listens at cc.llm.svc:80"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), "the host of"),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"), "is not trusted"),
        (httpx.ConnectTimeout("timed out"), "within 5 s"),
        (httpx.ReadTimeout("timed out"), "did not answer within 5 s"),
        (httpx.RemoteProtocolError("Server disconnected"), "closed the connection"),
        (httpx.UnsupportedProtocol("what"), "(UnsupportedProtocol)"),
    ],
)
def test_no_answer_is_explained(deployment, error, words):
    deployment.answers["GET", "/healthz"] = error
    with pytest.raises(Unreachable) as caught:
        list(access_checks.reach(deployment.front()))

    assert words in caught.value.reason
    assert caught.value.hint


@pytest.mark.parametrize("skew_s", [-300, 300])
def test_a_clock_that_is_wrong_is_found(deployment, skew_s):
    deployment.clock_s = NOW_S + skew_s
    found = one(access_checks.clock(deployment.front(), now_s=lambda: NOW_S), "clock")

    assert (found.level, found.facts["skew_s"]) == (Level.FAILED, skew_s)


@pytest.mark.parametrize(
    ("skews", "level"), [((-90.0, 0.0), Level.FAILED), ((1.0, -1.0), Level.OK), ((None, 0.0), Level.OK)]
)
def test_a_pods_clock_that_differs_from_the_gateways_is_found(deployment, skews, level):
    readyz(deployment, **{name: POD | {"clock_skew_s": skew} for name, skew in zip("ab", skews, strict=True)})
    found = one(part_checks.details(deployment.front()), "pod clocks")

    assert found.level is level
    assert ("a -90 s" in found.text) is (level is Level.FAILED)


def test_where_no_pod_tells_its_time_nothing_is_said_of_clocks(deployment):
    readyz(deployment, a=POD)

    assert "pod clocks" not in [found.check for found in part_checks.details(deployment.front())]


@pytest.mark.parametrize(
    ("missing", "words"),
    [("context manager", "Redis"), ("ready endpoint", "discovery.port"), ("time: x", "shutting down")],
)
def test_what_a_gateway_misses_is_told_with_what_to_do(deployment, missing, words):
    readyz(deployment, missing=[missing], pod=POD)
    found = one(part_checks.details(deployment.front()), "details")

    assert (found.level, missing in found.text, words in found.hint) == (Level.FAILED, True, True)


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ({}, {"pods": "failed"}),
        ({"a": POD, "b": POD | {"ready": False}}, {"pods": "warning", "sidecars": "ok"}),
        ({"a": POD | {"tiers": []}}, {"pods": "ok", "sidecars": "warning"}),
    ],
)
def test_pods_without_readiness_or_sidecar_are_named(deployment, pods, expected):
    readyz(deployment, **pods)

    assert levels(part_checks.details(deployment.front())) == expected


def test_a_draining_pod_is_named(deployment):
    readyz(deployment, a=POD | {"draining": True})
    texts = [finding.text for finding in part_checks.details(deployment.front())]

    assert "draining: a" in texts


def test_a_readiness_that_is_not_ours_is_told(deployment):
    deployment.answers["GET", "/readyz"] = (200, "ok")

    assert one(access_checks.ready(deployment.front()), "ready").level is Level.FAILED
    assert one(part_checks.details(deployment.front()), "details").level is Level.FAILED


def test_a_gateway_that_misses_something_is_told_with_where_to_ask(deployment):
    """A front says no more than that."""
    deployment.answers["GET", "/readyz"] = (503, {"ready": False})
    found = one(access_checks.ready(deployment.front()), "ready")

    assert (found.level, "--gateway-metrics" in found.hint) == (Level.FAILED, True)


def test_a_deployment_open_to_everybody_is_found(deployment):
    deployment.answers["GET", "/v1/context"] = (200, {"data": []})
    found = levels(access_checks.keys(deployment.front()))

    assert found == {"no key": "failed", "wrong key": "failed", "key": "ok"}


def test_a_key_nobody_knows_is_told(deployment):
    found = one(access_checks.keys(deployment.front(key="cc-old-key")), "key")

    assert (found.level, "hash-key" in found.hint) == (Level.FAILED, True)


def test_a_store_that_is_away_is_told_apart_from_a_wrong_key(deployment):
    def store_away(request):
        return error(503 if KEY in request.headers.get("authorization", "") else 401, "store_unavailable")

    deployment.answers["GET", "/v1/context"] = store_away
    found = one(access_checks.keys(deployment.front()), "key")

    assert (found.level, "Redis" in found.hint) == (Level.FAILED, True)


def test_without_a_key_only_that_is_checked_which_needs_none(deployment):
    found = levels(access_checks.keys(deployment.front(key=None)))

    assert found == {"no key": "ok", "wrong key": "ok", "key": "skipped"}


def test_the_check_of_a_wrong_key_sends_no_right_one(deployment):
    list(access_checks.keys(deployment.front()))
    sent = [request.headers.get("authorization", "") for request in deployment.requests]

    assert [KEY in value for value in sent] == [False, False, True]


def test_an_unknown_context_that_is_answered_otherwise_is_a_failure(deployment):
    path = "/v1/context/ctx_00000000000000000000000000000000"
    deployment.answers["GET", path] = (200, {})

    assert one(access_checks.isolation(deployment.front()), "isolation").level is Level.FAILED


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        ((200, {}, {"x-session-id": "ctx_2"}), Level.FAILED),
        (error(401, "invalid_api_key"), Level.WARNING),
        ((503, "no healthy upstream"), Level.FAILED),
    ],
)
def test_a_forged_header_that_gets_anywhere_is_found(deployment, answer, level):
    deployment.answers[COMPLETIONS] = answer
    found = one(access_checks.forged_headers(deployment.front(), "m"), "forged headers")

    assert found.level is level
    assert "x-context-identity" in deployment.requests[-1].headers


@pytest.mark.parametrize("answer", [(200, {"data": []}), (503, "x"), (200, [])])
def test_no_model_is_told(deployment, answer):
    deployment.answers["GET", "/v1/models"] = answer

    assert one(engine_checks.models(deployment.front(), ""), "models").level is Level.FAILED


def test_a_model_that_is_not_served_is_told_with_those_that_are(deployment):
    found = one(engine_checks.models(deployment.front(), "other"), "models")

    assert (found.level, found.facts["models"]) == (Level.FAILED, ["m"])


@pytest.mark.parametrize(
    ("arrivals_s", "level"),
    [
        ([0.2, 1.0, 2.0, 3.0, 4.0], Level.OK),
        ([3.9, 3.95, 3.98, 4.0], Level.WARNING),
        ([0.1, 0.1, 0.1, 0.1], Level.SKIPPED),
        ([2.0, 3.0], Level.SKIPPED),
        ([], Level.SKIPPED),
    ],
)
def test_a_stream_that_comes_at_once_was_held_back(arrivals_s, level):
    assert engine_checks.judge_stream(arrivals_s).level is level


@pytest.mark.parametrize(
    ("answer", "words"), [((200, "data: {}\n\n"), "without [DONE]"), (error(500, "internal_error"), "internal_error")]
)
def test_a_stream_that_breaks_off_is_told(deployment, answer, words):
    deployment.answers[COMPLETIONS] = answer
    found = one(engine_checks.streaming(deployment.front(), "m"), "streaming")

    assert (found.level, words in found.text) == (Level.FAILED, True)


def test_a_gateway_that_does_not_say_what_it_is_is_told(deployment):
    deployment.answers["GET", "/openapi.json"] = (404, "")

    assert one(engine_checks.versions(deployment.front(), "0.1.0"), "versions").level is Level.WARNING


@pytest.mark.parametrize("option", ["metrics_url", "injector_url", "manager_url"])
def test_a_metrics_port_that_does_not_answer_is_told(deployment, monkeypatch, option):
    deployment.answers["GET", "/metrics"] = httpx.ConnectError("refused")
    monkeypatch.setattr(examination, "Front", lambda *_, **__: deployment.front())
    findings = examine(Plan("http://cc.llm.svc", "0.1.0", **{option: "http://metrics"}))
    (found,) = [finding for finding in findings if "no process" in finding.text]

    assert found.level is Level.FAILED


@pytest.mark.parametrize("answer", [(200, "python_info 1\n"), (404, "")])
def test_a_metrics_port_that_is_another_is_told(deployment, answer):
    deployment.answers["GET", "/metrics"] = answer

    assert one(part_checks.gateway(deployment.front()), "metrics").level is Level.FAILED


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (error(503, "store_unavailable"), "Redis"),
        (error(503, "gateway_unavailable"), "pods"),
        ((404, "Not Found"), "route"),
        ((200, {"usage": {}}), "turn process"),
        ((500, "x"), "logs"),
    ],
)
def test_a_create_that_fails_ends_the_story_with_a_hint(deployment, answer, words):
    deployment.answers[CONTEXT] = answer
    (found,) = story(deployment.front(), "m")

    assert (found.check, found.level, words in found.hint) == ("create", Level.FAILED, True)


def turn(answer):
    """Return a completion that answers turns so, and is 404 after the delete as ever."""
    return lambda deployment: lambda request: error(404, "context_not_found") if deployment.deleted else answer


@pytest.mark.parametrize(
    ("answer", "check", "level"),
    [
        ((200, {"usage": usage(70, 0, 60)}, RECEIPTS | {"x-context-cache": "miss"}), "ask", Level.WARNING),
        ((200, {"usage": usage(10, 59, 60)}), "receipts", Level.WARNING),
        ((200, {"usage": usage(1, 20, 60)}, RECEIPTS), "usage", Level.FAILED),
        ((200, {"usage": usage(10, 59, 60) | {"total_tokens": 77}}, RECEIPTS), "usage", Level.FAILED),
        ((200, {"usage": usage(10, 59, 60, counted=11)}, RECEIPTS), "usage", Level.FAILED),
        ((200, {"usage": usage(10, 59, 60, counted=69)}, RECEIPTS), "usage", Level.OK),  # a key that counts as OpenAI
        ((200, {}, RECEIPTS), "usage", Level.FAILED),
        (error(500, "internal_error"), "ask", Level.FAILED),
    ],
)
def test_a_turn_that_is_not_as_it_should_be_is_told(deployment, answer, check, level):
    deployment.answers[COMPLETIONS] = turn(answer)(deployment)
    findings = list(story(deployment.front(), "m"))

    assert one(findings, check).level is level
    assert deployment.deleted


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("unsupported_layers", "operations/limits"),
        ("failure_policy", "kv_load_failure_policy"),
    ],
)
def test_an_engine_whose_kv_is_left_alone_is_told_though_its_own_cache_helped(deployment, reason, words):
    told = usage(10, 59, 60)
    told["context"]["reason"] = reason
    deployment.answers[COMPLETIONS] = turn((200, {"usage": told}, RECEIPTS))(deployment)
    found = one(story(deployment.front(), "m"), "ask")

    assert (found.level, found.facts["reason"]) == (Level.WARNING, reason)
    assert words in found.hint


@pytest.mark.parametrize("state", ["absent", "unreachable"])
def test_kv_that_is_not_there_is_told(deployment, state):
    def read(request):
        return (200, {"generation": 2, "holder": {"state": state}})

    deployment.answers["GET", f"/v1/context/{SESSION}"] = read

    assert one(story(deployment.front(), "m"), "read").level is Level.WARNING


def test_a_context_that_is_still_there_after_its_delete_is_told(deployment):
    deployment.answers[COMPLETIONS] = (200, {"usage": usage(10, 59, 60)}, RECEIPTS)

    assert one(story(deployment.front(), "m"), "delete").level is Level.FAILED


def test_a_context_is_deleted_also_when_the_story_breaks_off(deployment):
    deployment.answers[COMPLETIONS] = httpx.ReadTimeout("slow")
    with pytest.raises(Unreachable):
        list(story(deployment.front(), "m"))

    assert deployment.deleted


@pytest.mark.parametrize(
    ("days", "name", "expected"),
    [
        (100, "host", [Level.OK]),
        (3, "host", [Level.WARNING]),
        (100, "context-cache", [Level.OK, Level.WARNING]),
    ],
)
def test_a_certificate_is_judged_by_its_end_and_its_name(days, name, expected):
    outcome = tls_check.Handshake(name, NOW_S + days * 86_400)

    assert [found.level for found in tls_check.certificate(outcome, "host", now_s=lambda: NOW_S)] == expected


def test_a_certificate_that_is_not_believed_is_told():
    (found,) = tls_check.certificate(ssl.SSLError("no"), "host")

    assert (found.level, "--ca-file" in found.hint) == (Level.FAILED, True)


@pytest.mark.parametrize(
    ("host", "level"), [("cc-envoy.llm.svc", Level.OK), ("localhost", Level.OK), ("llm.example.org", Level.WARNING)]
)
def test_keys_in_clear_text_are_a_matter_of_where(host, level):
    (found,) = tls_check.plain(host)

    assert found.level is level


@pytest.mark.parametrize(
    ("sample", "level", "said"),
    [
        ('outcome="injected"} 3.0', Level.OK, "3 pods injected"),
        ('outcome="kv-connector"} 2.0', Level.WARNING, "kv-connector 2"),
        ('outcome="opted-out"} 2.0', Level.OK, "0 pods injected"),
    ],
)
def test_pods_that_an_injector_left_alone_are_counted_by_reason(sample, level, said):
    deployment = Deployment()
    deployment.answers["GET", "/metrics"] = (200, f"contextcache_injector_reviews_total{{{sample}\n")

    (finding,) = part_checks.injector(deployment.front())

    assert finding.level is level
    assert said in finding.text


def test_the_doctor_says_what_to_do_about_the_rust_front_end():
    deployment = Deployment()
    text = 'contextcache_injector_reviews_total{outcome="rust-frontend"} 2.0\n'
    deployment.answers["GET", "/metrics"] = (200, text)

    (finding,) = part_checks.injector(deployment.front())

    assert finding.level is Level.WARNING
    assert "rust-frontend 2" in finding.text
    assert "VLLM_USE_RUST_FRONTEND" in finding.hint


REDIS = "contextcache_manager_redis_precondition"


@pytest.mark.parametrize(
    ("text", "level", "said"),
    [
        (f'{REDIS}{{name="eviction_policy"}} 1.0\n{REDIS}{{name="replicas"}} NaN\n', Level.OK, "all preconditions"),
        (f'{REDIS}{{name="eviction_policy"}} 0.0\n{REDIS}{{name="version"}} 1.0\n', Level.WARNING, "eviction_policy"),
        (f'{REDIS}{{name="eviction_policy"}} NaN\n', Level.SKIPPED, "+info"),
        ("contextcache_injector_reviews_total 1.0\n", Level.FAILED, "not a context-manager's"),
    ],
)
def test_how_a_manager_s_redis_is_set_is_told(text, level, said):
    deployment = Deployment()
    deployment.answers["GET", "/metrics"] = (200, text)

    (finding,) = part_checks.manager(deployment.front())
    assert finding.level is level
    assert said in finding.text


def test_keys_that_redis_evicted_are_a_failure_whatever_its_policy_is_by_now():
    deployment = Deployment()
    text = f'contextcache_manager_redis_evicted_keys 7.0\n{REDIS}{{name="eviction_policy"}} 1.0\n'
    deployment.answers["GET", "/metrics"] = (200, text)

    evicted, policy = part_checks.manager(deployment.front())
    assert (evicted.level, policy.level) == (Level.FAILED, Level.OK)
    assert "7 keys" in evicted.text


def test_metrics_of_something_else_are_no_injector_s():
    deployment = Deployment()
    deployment.answers["GET", "/metrics"] = (200, "contextcache_gateway_ext_proc_streams 1\n")

    assert [finding.level for finding in part_checks.injector(deployment.front())] == [Level.FAILED]
