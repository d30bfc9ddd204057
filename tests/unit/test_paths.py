"""No path that a patch, overlay or archive names leads out of its root, and ordinary names all pass."""
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchset.errors import DirtyTarget
from patchset.paths import inside, why_unsafe

PART = st.sampled_from(["a", "b.py", "..", ".", "", ".git", ".GIT", "link", "C:", "x\\y", "x\ny", "é", "\udcff",
                        ".github"])


@pytest.mark.parametrize("path", ["a", "a/b.py", "é/b c.py", ".github/x", "a/.gitignore", "a..b"])
def test_ordinary_paths_pass(path, tmp_path):
    assert why_unsafe(path) == "" and inside(tmp_path, path) == tmp_path / path


@pytest.mark.parametrize("path", ["", "/a", "a//b", "a/", "../a", "a/../b", "./a", ".git/config", "a/.Git/x", "C:/a",
                                  "a\\b", "a\nb", "a\x7f"])
def test_paths_that_mislead_are_refused_with_a_remedy(path, tmp_path):
    assert why_unsafe(path)
    with pytest.raises(DirtyTarget) as caught:
        inside(tmp_path, path)
    assert caught.value.remedy and caught.value.rows


@given(st.lists(PART, min_size=1, max_size=5).map("/".join))
def test_nothing_leads_out_of_the_root(tmp_path_factory, path):
    root = tmp_path_factory.getbasetemp() / "root"
    if not root.exists():
        (root / "a").mkdir(parents=True)
        (root / "link").symlink_to("..")
    try:
        place = inside(root, path)
    except DirtyTarget:
        return
    assert os.path.realpath(place) == str(place) and place.is_relative_to(root.resolve())


@pytest.mark.parametrize("link", ["a", "a/b", "a/b/c.py"])
def test_a_link_in_the_way_is_refused_wherever_it_lies(link, tmp_path):
    place = tmp_path / "root" / link
    place.parent.mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    place.symlink_to(tmp_path / "outside")
    with pytest.raises(DirtyTarget, match="symbolic link"):
        inside(tmp_path / "root", "a/b/c.py")


def test_a_file_where_a_folder_is_needed_is_named(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(DirtyTarget, match="a file stands"):
        inside(tmp_path, "a/b/c")
