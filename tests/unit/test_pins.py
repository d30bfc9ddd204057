"""patchset.toml is refused by the name of the key at fault, never by a traceback."""
import tomllib

import pytest
from checkout import NEW, PINS
from hypothesis import given, settings
from hypothesis import strategies as st

from patchset import pins
from patchset.errors import UsageError


def load(tmp_path, text):
    (tmp_path / "patchset.toml").write_text(text)
    return pins.load(tmp_path)


def test_what_is_pinned_is_read(tmp_path):
    found = load(tmp_path, PINS)
    assert found.upstream("toy").release().version == NEW and found.profile("all").arch == ("sm90", "sm100")


@pytest.mark.parametrize(("old", "new", "named"), [
    ("schema = 1\n", "", "schema"), ("schema = 1", "schema = 2", "schema 2"), ("schema = 1", "schema =", "not TOML"),
    ('package = "toy"', 'pakage = "toy"', "package"), ('package = "toy"\n', "", "package"),
    ('distribution = "toy"', "distribution = 1", "distribution"), ('target = "build/toy"', "target = []", "target"),
    ('target = "build/toy"', 'target = "../toy"', "target"), ('target = "build/toy"', 'target = "/toy"', "target"),
    ('package = "toy"', 'package = "a/../.."', "package"),
    (f'version = "{NEW}"', "version = 2.0", "version"), (f'version = "{NEW}"', 'version = "3"', "not pinned"),
    (f'release."{NEW}"]', f'release."{NEW}/../x"]', "2.0.0/../x"),
    (f'sdist = "{"0" * 64}"', "sdist = 0", "sdist"), (f'sdist = "{"0" * 64}"', 'sdist = "00"', "sdist"),
    (f'sdist = "{"0" * 64}"', f'sdist = "{"0" * 64}"\nwheel = 5', "wheel"),
    (f'sdist = "{"0" * 64}"', f'sdist = "{"0" * 64}"\ntag = ["v2"]', "tag"),
    (f'sdist = "{"0" * 64}"', f'sdist = "{"0" * 64}"\nhweel = ""', "wheel"),
    ('upstreams = ["toy"]', 'upstreams = "toy"', "upstreams"), ('upstreams = ["toy"]', 'upstreams = ["tyo"]', "toy"),
    ('arch = ["sm90", "sm100"]', "arch = [90]", "arch"), ('arch = ["sm90", "sm100"]\n', "", "arch"),
    ('package = "toy"', 'package = "toy"\noptional = "yes"', "optional"),
    ("[profile.all]", "[[profile.all]]", "profile.all"), ("[profile.all]", "[profile]", "profile"),
])
def test_every_fault_is_named(tmp_path, old, new, named):
    assert old in PINS
    with pytest.raises(UsageError) as caught:
        load(tmp_path, PINS.replace(old, new, 1)).upstream("toy").release()
    assert named in f"{caught.value.message} {caught.value.remedy}" and caught.value.remedy


def test_a_typing_error_is_answered_with_what_was_meant(tmp_path):
    found = load(tmp_path, PINS)
    with pytest.raises(UsageError) as caught:
        found.upstream("tpy")
    assert "'toy'" in caught.value.remedy
    with pytest.raises(UsageError, match="no profile"):
        found.profile("none")


def test_a_folder_without_pins_is_no_checkout(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        pins.load(tmp_path)


VALUE = st.sampled_from(['""', "1", "1.5", "true", "[]", "[1]", "{}", '{a = "b"}', '["toy"]', '"../x"', "1979-05-27"])
LINES = PINS.splitlines()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([n for n, line in enumerate(LINES) if " = " in line]), VALUE)
def test_no_value_makes_it_fail_otherwise(tmp_path_factory, number, value):
    text = "\n".join([*LINES[:number], f"{LINES[number].split(' = ')[0]} = {value}", *LINES[number + 1 :]])
    tomllib.loads(text)
    try:
        load(tmp_path_factory.getbasetemp(), text)
    except UsageError:
        pass


def test_an_optional_upstream_is_taken_only_where_it_is_named(tmp_path):
    plain = load(tmp_path, PINS)
    assert [one.name for one in plain.standard()] == ["toy"]
    found = load(tmp_path, PINS.replace('package = "toy"', 'package = "toy"\noptional = true'))
    assert found.standard() == found.standard(["toy"]) == [] and found.upstream("toy").optional
