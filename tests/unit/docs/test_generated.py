"""What pages take from code and from results is there, whole and current; a page is rewritten nowhere else."""

from __future__ import annotations

import json
import re
import sys

import pytest

from deploy.docs.__main__ import ROOT, main, written
from deploy.docs.blocks import filled
from deploy.docs.figures import RESULTS, figures
from deploy.docs.metrics import PARTS, metrics_of
from deploy.docs.settings import PROCESSES, SHARED

SETTINGS = (ROOT / "docs/reference/settings.md").read_text()
METRICS = (ROOT / "docs/reference/metrics.md").read_text()


def test_every_page_is_as_it_is_generated():
    """Seen to fail with a default of the gateway's settings changed, and with a figure changed in a result."""
    stale = [str(page.relative_to(ROOT)) for page, text in written().items() if page.read_text() != text]

    assert stale == [], "run python -m deploy.docs"


def test_every_result_says_the_commit_and_the_day_of_its_run():
    """Seen to fail with the day taken out of one."""
    said = {file.name: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}

    assert len(said) > 10
    assert [name for name, result in said.items() if not (result.get("commit") and result.get("date"))] == []


def test_a_figure_without_a_run_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("deploy.docs.figures.RESULTS", tmp_path)

    assert figures("turns", "") == "(no run of `bench_turns` is kept yet)"


def kept(monkeypatch, directory, name, **result):
    """Return the figures called `name` of a run with this result."""
    monkeypatch.setattr("deploy.docs.figures.RESULTS", directory)
    (directory / f"bench_{name}.json").write_text(json.dumps({"commit": "abc1234", "date": "2026-11-23", **result}))
    return figures(name, "")


def test_a_missed_bar_and_a_system_that_is_near_are_marked(monkeypatch, tmp_path):
    """Seen to fail with the marks taken out."""
    row = {"what": "turn", "percentile": 95, "sessions_ms": 3000.0, "stateless_ms": 5000.0, "ratio": 0.6, "bar": 0.5}
    cost = {"with_ms": 10.3, "without_ms": 10.0, "ratio": 1.03, "ratio_95": [1.01, 1.05], "bar": 1.02, "met": False}
    near = {"size": 1200, "way": "disk"}
    times = [near | {"system": name, "ttft_ms_median": ms} for name, ms in (("ours", 120.0), ("lmcache", 121.0))]

    turns = kept(
        monkeypatch, tmp_path, "turns", agents=32, rows=[row | {"met": False}, row | {"bar": None, "met": None}]
    )
    overhead = kept(monkeypatch, tmp_path, "overhead", rows=[cost | {"what": "ttft"}])
    beside = kept(monkeypatch, tmp_path, "beside", ttft=times, rows=[near | {"beside": "lmcache", "met": False}])

    assert "| whole turn, 95th percentile | 3.0 s | 5.0 s | 0.60 | ≤ 0.5, **missed** |\n" in turns
    assert "| whole turn, 95th percentile | 3.0 s | 5.0 s | 0.60 |  |\n" in turns
    assert "| time to the first token | 10.3 ms | 10.0 ms | 1.030 (1.010 to 1.050) | ≤ 1.02, **missed** |\n" in overhead
    assert "| 1 200 | disk | 120 ms | 121 ms | **not ahead of LMCache** |\n" in beside


def test_a_stale_page_is_noticed(monkeypatch):
    texts = written()
    page = next(iter(texts))
    monkeypatch.setattr("deploy.docs.__main__.written", lambda: {page: texts[page] + "\n"})
    monkeypatch.setattr(sys, "argv", ["deploy.docs", "--check"])

    with pytest.raises(SystemExit, match=re.escape(str(page.relative_to(ROOT)))):
        main()


def test_a_marked_place_is_filled_and_the_rest_left_alone():
    page = (
        "a <!-- generated: one x -->old<!-- /generated --> b\n<!-- generated: two -->\n\nold\n\n<!-- /generated -->\n"
    )

    text = filled(page, lambda kind, name: f"{kind}/{name}" if kind == "one" else "- 1\n- 2")

    assert text == (
        "a <!-- generated: one x -->one/x<!-- /generated --> b\n"
        "<!-- generated: two -->\n\n- 1\n- 2\n\n<!-- /generated -->\n"
    )


@pytest.mark.parametrize("prefix", PROCESSES)
def test_every_setting_stands_once(prefix):
    """Seen to fail with the section of the injector taken out."""
    for name in PROCESSES[prefix].model_fields.keys() - SHARED:
        assert SETTINGS.count(f"\n- `{prefix}{name.upper()}` (") == 1, name


@pytest.mark.parametrize("part", [*PARTS, "connector"])
def test_every_metric_stands_once(part):
    """Seen to fail with the section of the connector taken out, and with a metric listed twice."""
    for metric in metrics_of(part):
        shared = metric.name.replace(f"_{part}_", "_…_")
        assert metric.meaning, metric.name
        assert 1 in {METRICS.count(f"\n- `{name}` (") for name in (metric.name, shared)}, metric.name


def test_no_other_page_lists_a_metric_or_a_setting():
    """Seen to fail with the injector's table of metrics left in docs/operations/pod-injector.md."""
    listed = re.compile(r"^(?:\| |- )`(contextcache_\w+|(?:GATEWAY|MANAGER|SIDECAR|TURN|INJECTOR)_\w+)`", re.MULTILINE)
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in {"settings.md", "metrics.md"}]

    found = [(page.name, name) for page in pages for name in listed.findall(page.read_text())]
    assert [(page, name) for page, name in found if f"`{name}`" in SETTINGS + METRICS] == []
