"""Our reader of tar headers finds in every pinned sdist what Python's tarfile finds."""
import tarfile

import pytest
from delivery import ROOT, sdist

from patchset import archive, pins, tar

RELEASES = {f"{up.name}-{release.version}": (up, release) for up in pins.load(ROOT).upstreams.values()
            for release in up.releases.values()}
KINDS = {tarfile.REGTYPE: tar.FILE, tarfile.DIRTYPE: tar.FOLDER}


@pytest.mark.parametrize("name", RELEASES)
def test_members_are_those_that_tarfile_finds(name):
    place = sdist(*RELEASES[name])
    with tarfile.open(place) as known:
        expected = [(one.name, KINDS[one.type], one.size, one.mode) for one in known]
    assert [tuple(member) for _, member, _ in archive._members(place, "")] == expected
