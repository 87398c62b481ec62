"""Progress lines and log excerpts."""

import pytest

from deploy.local.progress import Step, last_line, last_lines, log_excerpt


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


def test_a_progress_bar_counts_as_its_last_state(tmp_path):
    log = tmp_path / "pip.log"
    log.write_text("10%\r20%\r30%")

    assert last_line(log) == "30%"


def test_a_log_that_is_missing_or_empty_is_said_to_be_empty(tmp_path):
    assert last_line(tmp_path / "none.log") == ""
    assert "(the log is empty)" in log_excerpt(tmp_path / "none.log")
