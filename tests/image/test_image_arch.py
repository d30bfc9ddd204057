"""The architectures of a library: read from fat binaries, and an unknown layout is an error, never an empty answer."""
import image_arch
import pytest
from fat_binary import container, elf, entry


@pytest.fixture
def library(tmp_path):
    def make(**sections):
        path = tmp_path / "lib.so"
        path.write_bytes(elf(**sections))
        return path
    return make


def test_machine_code_and_ptx_of_every_container_are_found(library):
    fat = container(entry(image_arch.SASS, 90), entry(image_arch.PTX, 90)) + b"\0" * 16 + container(
        entry(image_arch.SASS, 100), entry(image_arch.SASS, 90))
    assert image_arch.architectures(library(nv_fatbin=fat)) == ["compute_90", "sm_90", "sm_100"]


def test_a_library_without_gpu_code_has_none(library):
    assert image_arch.architectures(library(text=b"code")) == []


@pytest.mark.parametrize("fat, said", [
    (b"\x01" * 32, "unknown fat binary container"),
    (container(entry(7, 90)), "unknown fat binary entry"),
    (container(entry(image_arch.SASS, 90))[:-8], "runs past its section"),
], ids=["container", "entry", "cut off"])
def test_another_layout_is_an_error(library, fat, said):
    with pytest.raises(image_arch.BadLibrary, match=said):
        image_arch.architectures(library(nv_fatbin=fat))


def test_a_file_of_another_kind_is_an_error(tmp_path):
    (tmp_path / "x.so").write_bytes(b"MZ" * 64)
    with pytest.raises(image_arch.BadLibrary, match="not a 64-bit"):
        image_arch.architectures(tmp_path / "x.so")


def test_ptx_is_no_machine_code():
    assert image_arch.lacking(["compute_90", "sm_100"], ["9.0", "10.0"]) == ["9.0"]
    assert image_arch.lacking(["sm_90", "sm_100"], ["9.0", "10.0"]) == []


def test_the_command_says_what_lacks_and_fails(library, capsys, monkeypatch):
    path = library(nv_fatbin=container(entry(image_arch.SASS, 90)))
    monkeypatch.setattr("sys.argv", ["image_arch.py", "--need", "9.0", "--need", "10.0", str(path)])
    assert image_arch.main() == 1 and "sm_90; lacks 10.0" in capsys.readouterr().out
