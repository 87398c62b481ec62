"""The tools of these tests: a check names every release that fails, and a rendering is made once for everybody."""

from __future__ import annotations

import subprocess
import sys

from tests.chart.each_release import failures
from tests.chart.manifests import of_kind
from tests.chart.releases import RELEASES
from tests.chart.rendering import ROOT, Release, kept_folder

SOME = {name: RELEASES[name] for name in ("defaults", "injector", "keda", "rules")}
# Another one stands in Helm's place: it counts its calls, and takes long enough for two of them to meet.
ASK = """
import os, sys, time
from pathlib import Path
from tests.chart import rendering
rendering.KEPT, name = Path(sys.argv[1]), sys.argv[2]
def ask(release, helm):
    Path(sys.argv[1], f"call-{os.getpid()}").touch()
    time.sleep(0.3)
    return 0, f"made by {os.getpid()}", ""
rendering._helm_says = ask
print(rendering.helm_says(rendering.Release(name=name))[1])
"""


def test_a_check_names_each_release_that_fails_with_its_reason_and_no_other():
    def check(release, documents):
        scaled = of_kind(documents, "ScaledObject")
        assert not scaled, release.name
        assert of_kind(documents, "PrometheusRule")[0]["kind"] if "monitoring" in release.values else True
        assert "injector" not in release.values, "there is one"

    assert failures(check, SOME).keys() == {"injector", "keda"}
    assert failures(check, SOME)["injector"].startswith("there is one")


def test_a_check_that_breaks_and_a_release_that_does_not_render_fail_and_the_others_are_looked_at():
    old = Release(RELEASES["defaults"].values, kube_version="1.29.0")
    wrong = failures(lambda documents: of_kind(documents, "ScaledObject")[0], {**SOME, "old": old})

    assert wrong.keys() == {"defaults", "injector", "rules", "old"}
    assert wrong["rules"] == "IndexError: list index out of range"
    assert "1.30" in wrong["old"]


def test_processes_that_want_the_same_rendering_at_once_have_it_made_once(tmp_path):
    command = [sys.executable, "-c", ASK, str(tmp_path)]
    asking = [
        subprocess.Popen([*command, name], cwd=ROOT, text=True, stdout=subprocess.PIPE) for name in ("a", "a", "b")
    ]
    first, same, other = (process.communicate(timeout=60)[0] for process in asking)

    assert first == same != other
    assert len(list(tmp_path.glob("call-*"))) == 2


def test_what_is_kept_is_of_this_chart_only(tmp_path, monkeypatch):
    before = kept_folder()
    (tmp_path / "chart").mkdir()
    (tmp_path / "chart" / "values.yaml").write_text("changed: true")
    monkeypatch.setattr("tests.chart.rendering.CHART", tmp_path / "chart")
    monkeypatch.setattr("tests.chart.rendering.KEPT", tmp_path / "kept")

    assert kept_folder.__wrapped__().name != before.name
