"""Progress lines and log excerpts."""

import os
import sys

import pytest

from deploy.local.parts import Part
from deploy.local.paths import StackPaths
from deploy.local.progress import (
    Step,
    StepFailed,
    begin_run,
    exit_code,
    last_line,
    last_lines,
    log_excerpt,
    run_logged,
)
from deploy.local.starting import PartProcesses


def test_a_step_says_how_it_began_and_ended():
    lines = []
    with Step("model", print_line=lines.append):
        pass

    assert lines[0] == "  model …"
    assert lines[1].startswith("  model: done after ")


@pytest.mark.parametrize(("error", "ending"), [(ValueError, "failed"), (KeyboardInterrupt, "stopped")])
def test_a_step_that_breaks_says_so_and_lets_the_error_through(error, ending):
    lines = []
    with pytest.raises(error), Step("model", print_line=lines.append):
        raise error

    assert lines[-1].startswith(f"  model: {ending} after ")


def test_the_end_of_a_log_is_its_last_lines_with_text(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("".join(f"line {number}\n\n" for number in range(30)))

    assert last_lines(log, 3) == ["line 27", "line 28", "line 29"]
    assert len(last_lines(log)) == 20
    assert last_line(log) == "line 29"


def test_an_excerpt_shows_only_the_run_that_failed(tmp_path):
    """Seen failing: the lines of the run before stood above those of this one, and were taken for its reason."""
    log = tmp_path / "logs" / "gateway.log"
    begin_run(log)
    with log.open("a") as output:
        output.write("an error of yesterday\nand its last line without an end")
    begin_run(log)

    assert last_lines(log) == []
    assert "(the log is empty)" in log_excerpt(log)
    with pytest.raises(StepFailed) as caught:
        run_logged([sys.executable, "-c", "raise SystemExit('the port is taken')"], what="gateway", log=log)
    assert "the port is taken" in str(caught.value)
    assert "yesterday" not in str(caught.value)
    assert "run begins" not in str(caught.value)
    assert "yesterday" in log.read_text()


def test_a_part_that_does_not_start_is_told_with_the_lines_of_this_start(tmp_path):
    paths = StackPaths(tmp_path)
    paths.log("gateway").parent.mkdir(parents=True)
    paths.log("gateway").write_text("an error of yesterday\n")
    part = Part(
        name="gateway",
        kind="gateway",
        command=(sys.executable, "-c", "raise SystemExit('said today')"),
        env=dict(os.environ),
        ports=(),
        url="http://127.0.0.1:1",
        is_ready=lambda: False,
        ready_within_s=60,
        grace_s=5,
    )
    with pytest.raises(StepFailed) as caught:
        PartProcesses(paths).start([part], lambda: None)

    assert "said today" in str(caught.value)
    assert "yesterday" not in str(caught.value)


def test_a_progress_bar_counts_as_its_last_state(tmp_path):
    log = tmp_path / "pip.log"
    log.write_text("10%\r20%\r30%")

    assert last_line(log) == "30%"


def test_a_log_that_is_missing_or_empty_is_said_to_be_empty(tmp_path):
    assert last_line(tmp_path / "none.log") == ""
    assert "(the log is empty)" in log_excerpt(tmp_path / "none.log")


@pytest.mark.parametrize(
    ("error", "code", "said"), [(StepFailed("no engine"), 1, "error: no engine"), (KeyboardInterrupt(), 130, "stopped")]
)
def test_a_failed_part_and_ctrl_c_end_a_program_with_a_code(capsys, error, code, said):
    """Seen failing with StepFailed raised past `main`."""

    @exit_code
    def main():
        raise error

    assert main() == code
    assert said in "".join(capsys.readouterr())
