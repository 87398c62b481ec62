"""The report: signs, hints, counts, the exit status, and nothing secret in any of it."""

from __future__ import annotations

import json

from contextcache.doctor import access_checks
from contextcache.doctor.finding import as_json, exit_status, failed, lines_of, ok, skipped, summary, warning
from contextcache.doctor.story import story
from tests.unit.doctor.deployment import KEY, Deployment

ALL = [ok("a", "fine", ms=1), warning("b", "odd", "look"), failed("c", "broken", "mend " * 40), skipped("d", "later")]


def test_each_finding_has_a_sign_and_its_hint_below():
    lines = [list(lines_of(finding)) for finding in ALL]

    assert [line[0][0] for line in lines] == ["✓", "!", "✗", "-"]
    assert lines[0] == ["✓ a               fine"]
    assert lines[1][1].strip() == "→ look"
    assert max(len(line) for line in lines[2]) <= 120


def test_a_failure_decides_the_exit_status_and_a_warning_does_not():
    assert [exit_status(ALL), exit_status(ALL[:2]), exit_status([])] == [1, 0, 0]


def test_the_summary_counts():
    assert [summary(ALL), summary(ALL[:2]), summary(ALL[:1])] == [
        "1 of 4 checks failed.",
        "All works; 1 of 2 checks need attention.",
        "All is well.",
    ]


def test_the_json_report_has_the_same():
    report = json.loads(as_json("http://x", ALL))

    assert (report["ok"], report["failed"], report["warnings"]) == (False, 1, 1)
    assert report["findings"][0] == {"check": "a", "level": "ok", "text": "fine", "facts": {"ms": 1}}
    assert report["findings"][1]["hint"] == "look"


def test_no_report_holds_a_key():
    front = Deployment().front()
    findings = [*access_checks.keys(front), *story(front, "m")]
    refused = [*access_checks.keys(Deployment().front(key="cc-wrong-key"))]

    said = as_json("http://x", [*findings, *refused]) + repr(front.key)
    assert KEY not in said
    assert "cc-wrong-key" not in said
