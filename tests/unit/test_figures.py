"""A figure in the documents shows the records of today."""
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import make_figures  # noqa: E402


@pytest.mark.parametrize("name", [*make_figures.TRAIN, make_figures.ON, make_figures.OFF])
def test_the_figure_was_drawn_from_todays_records(name):
    drawn = make_figures.FIGURE.read_text()
    assert f"{name} {make_figures.digest(name)}" in drawn, "run python docs/make_figures.py and commit the figure"
