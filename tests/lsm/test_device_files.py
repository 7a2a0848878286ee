"""What is asked of a kernel before the BPF program is loaded, and where its pins lie. That it works: tests/vm/guest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qgpu.errors import NotSupportedError
from qgpu.lsm import device_files, libbpf, pins

DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
505 nvidia-uvm
506 nvidia-caps

Block devices:
  7 nvidia-looking
"""


def test_nvidias_majors_are_those_of_character_devices(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text(DEVICES)

    assert device_files.majors(tmp_path / "devices") == {195, 505, 506}


@pytest.fixture
def kernel(tmp_path: Path) -> dict[str, Path]:
    """What a kernel that can says of itself."""
    said = {"lsms": "lockdown,yama,bpf\n", "types": "", "mounts": "30 20 0:26 / /sys/fs/bpf rw - bpf bpf rw\n"}
    for name, text in said.items():
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in said}


def test_a_kernel_that_can_is_taken(kernel: dict[str, Path]) -> None:
    device_files.check_kernel(**kernel)
    kernel["lsms"].unlink()  # securityfs is not mounted everywhere; then what is loaded has to prove itself
    device_files.check_kernel(**kernel)


def test_a_kernel_without_bpf_among_its_lsms_says_how_to_boot(kernel: dict[str, Path]) -> None:
    kernel["lsms"].write_text("lockdown,yama\n")

    with pytest.raises(NotSupportedError, match="boot with lsm=lockdown,yama,bpf"):
        device_files.check_kernel(**kernel)


def test_a_kernel_without_types_is_named(kernel: dict[str, Path]) -> None:
    kernel["types"].unlink()

    with pytest.raises(NotSupportedError, match="CONFIG_DEBUG_INFO_BTF"):
        device_files.check_kernel(**kernel)


def test_a_bpf_file_system_that_is_not_mounted_is_named(kernel: dict[str, Path]) -> None:
    kernel["mounts"].write_text("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n")

    with pytest.raises(NotSupportedError, match="mount -t bpf bpf /sys/fs/bpf"):
        device_files.check_kernel(**kernel)


class FakeObject:
    """A compiled object whose programs are files."""

    done: list[str]
    fails = ""

    def skip_unknown_hooks(self) -> list[str]:
        return ["free", "ioctl", "open"]

    def pin_maps(self, directory: Path) -> None:
        (directory / "files").touch()

    def load(self) -> None:
        """Nothing to load."""

    def attach(self, name: str, pin: Path) -> None:
        if name == self.fails:
            raise OSError(22, "Invalid argument", name)
        self.done.append(name)
        pin.touch()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeObject:
    made = FakeObject()
    made.done = []

    @contextmanager
    def opened(_path: Path) -> Iterator[FakeObject]:
        yield made

    monkeypatch.setattr(libbpf, "opened", opened)
    return made


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.o").write_bytes(b"one")
    return tmp_path / "program.o"


def test_programs_are_loaded_once(fake: FakeObject, program: Path, tmp_path: Path) -> None:
    home = tmp_path / "bpf"

    assert pins.install(program, home)
    assert not pins.install(program, home)
    assert fake.done == ["free", "ioctl", "open"]
    assert [sorted(path.name for path in folder.iterdir()) for folder in pins.links(home)] == [
        ["free", "ioctl", "open"]
    ]


def test_other_programs_take_their_place_on_the_same_maps(fake: FakeObject, program: Path, tmp_path: Path) -> None:
    home = tmp_path / "bpf"
    pins.install(program, home)
    (before,) = pins.links(home)
    (pins.maps(home) / "files").write_text("known")
    program.write_bytes(b"two")

    assert not pins.install(program, home)
    (after,) = pins.links(home)
    assert after != before
    assert (pins.maps(home) / "files").read_text() == "known"


def test_programs_that_fail_leave_those_before(fake: FakeObject, program: Path, tmp_path: Path) -> None:
    home = tmp_path / "bpf"
    pins.install(program, home)
    before = pins.links(home)
    program.write_bytes(b"two")
    fake.fails = "ioctl"

    with pytest.raises(OSError, match="ioctl"):
        pins.install(program, home)
    assert pins.links(home) == before
    assert sorted(path.name for path in (home / "1").iterdir()) == [before[0].name, "maps"]


def test_programs_that_fail_at_first_leave_nothing(fake: FakeObject, program: Path, tmp_path: Path) -> None:
    fake.fails = "open"

    with pytest.raises(OSError, match="open"):
        pins.install(program, tmp_path / "bpf")
    assert not (tmp_path / "bpf" / "1").exists()


def test_what_a_dead_loader_left_half_done_is_begun_anew(fake: FakeObject, program: Path, tmp_path: Path) -> None:
    """Its maps may name files that ended when nothing was attached."""
    home = tmp_path / "bpf"
    (home / "1" / "maps").mkdir(parents=True)
    (home / "1" / "maps" / "stale").touch()
    (home / "1" / "new-0").mkdir()

    assert pins.install(program, home)
    assert sorted(path.name for path in (home / "1").rglob("*") if path.is_file()) == ["files", "free", "ioctl", "open"]
    pins.remove(home)
    pins.remove(home)  # there is no harm in that
    assert not home.exists()
