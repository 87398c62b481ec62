"""The doctor before a front that is broken, or means ill: it ends, says so, and orders no terminal about."""

from __future__ import annotations

import itertools

import httpx
import pytest

from contextcache.cli.app import run
from contextcache.doctor import examination, part_checks
from contextcache.doctor.examination import Plan, examine
from contextcache.doctor.finding import Level, as_json, failed, lines_of
from contextcache.doctor.front import ApiKey, Front, Unreachable
from tests.unit.doctor.deployment import KEY, Deployment

ORDERS = "\x1b[2J\x1b]52;c;aGk=\x07\x9b31m\u202edone\n✓ all is well"


def front_of(pieces, *, clock=lambda: 0.0):
    """Return a front whose answers are made of `pieces`."""
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=pieces()))
    return Front("http://cc", key=None, timeout_s=5, transport=transport, monotonic_s=clock)


def test_an_answer_without_an_end_is_given_up_by_its_size():
    front = front_of(lambda: itertools.repeat(b"x" * (1 << 20)))
    with pytest.raises(Unreachable, match="does not end"):
        front.call("GET", "/healthz")
    with pytest.raises(Unreachable, match="does not end"):
        front.stream("/v1/completions", {})


def test_an_answer_that_trickles_is_given_up_by_its_time():
    clock = itertools.count()
    front = front_of(lambda: itertools.repeat(b"x"), clock=lambda: float(next(clock)))
    with pytest.raises(Unreachable, match="within 5 s"):
        front.call("GET", "/healthz")


@pytest.mark.parametrize(
    "body", ["[" * 100_000, '"' + "\\ud800" * 9 + '"', "", '{"error": [1]}', '{"error": {"message": {"a": 1}}}']
)
def test_an_answer_that_is_no_json_of_ours_is_described(body):
    answer = front_of(lambda: iter([body.encode()])).call("GET", "/")

    assert answer.describe().startswith("200")


NONSENSE = {
    ("GET", "/healthz"): (200, {}, {"date": "yesterday"}),
    ("GET", "/readyz"): (200, {"ready": {}, "missing": [], "endpoints": [1]}),
    ("GET", "/v1/models"): (200, {"data": {"id": 1}}),
    ("GET", "/version"): (200, [1]),
    ("GET", "/openapi.json"): (200, {"info": [1]}),
    ("POST", "/v1/context"): (200, {"session_id": "ctx_1", "usage": {"prompt_tokens": "many"}}),
}


@pytest.mark.parametrize("which", NONSENSE, ids=lambda which: which[1])
def test_answers_of_a_wrong_shape_are_findings_and_the_examination_goes_on(monkeypatch, which):
    deployment = Deployment()
    deployment.answers[which] = NONSENSE[which]
    monkeypatch.setattr(examination, "Front", lambda *_, **__: deployment.front())
    found = list(examine(Plan("http://cc.llm.svc", "0.1.0", key=ApiKey(KEY), with_story=True)))

    checks = [finding.check for finding in found]
    assert "versions" in checks
    assert any(finding.level in (Level.FAILED, Level.WARNING) for finding in found)
    # A context that was made is not left behind.
    assert which != ("POST", "/v1/context") or deployment.deleted


def test_what_a_front_says_orders_no_terminal_about():
    deployment = Deployment()
    deployment.answers["GET", "/readyz"] = (503, {"missing": [ORDERS], "endpoints": {ORDERS: {"ready": False}}})
    findings = list(part_checks.details(deployment.front()))
    lines = [line for finding in findings for line in lines_of(finding)]

    assert len(findings) == 2
    assert all(line.isprintable() for line in lines)
    assert as_json("http://cc", findings).isascii()


def test_what_a_front_says_is_shown_in_part():
    assert len(next(iter(lines_of(failed("a", "x" * 100_000, ""))))) < 2000


def test_a_password_in_the_url_is_refused_and_not_repeated(capsys):
    with pytest.raises(SystemExit) as ended:
        run(["doctor", "--url", "https://me:hunter2@llm.example.org"])

    assert ended.value.code == 2
    assert "hunter2" not in "".join(capsys.readouterr())
