"""Tables for people."""

from deploy.local.table import render


def test_columns_are_aligned_and_figures_stand_to_the_right():
    table = render(["step", "ms"], [["cold", "1650.2"], ["restored", "53.1"], ["kill", "-"]])

    assert table.splitlines() == [
        "step          ms",
        "--------  ------",
        "cold      1650.2",
        "restored    53.1",
        "kill           -",
    ]


def test_a_column_with_a_word_stands_to_the_left():
    assert render(["source"], [["7"], ["disk"]]).splitlines()[2] == "7"


def test_a_table_without_rows_is_its_head():
    assert render(["a", "b"], []) == "a  b\n-  -"
