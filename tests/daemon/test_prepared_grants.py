"""Claims are kept on disk and in CDI files, as what they are or not at all."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from qgpu.errors import InvalidValueError, PermissionDeniedError, RefusedError, UnknownNameError
from tests.daemon.claim_rig import GIB

pytestmark = pytest.mark.root


def test_requests_without_shares_have_names_of_their_own(rig):
    assert rig.prepare("a", rig.device(), rig.device(), rig.device(request="b/c")) == ("a-gpu", "a-gpu-2", "a-b-c")


def test_two_claims_may_not_have_devices_of_one_name(rig):
    rig.prepare("a", rig.device(share="b-c"))

    with pytest.raises(RefusedError, match="claim shop/claim-a has a device a-b-c"):
        rig.prepare("a-b", rig.device(share="c"))
    assert set(rig.listed()) == {"a"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"uid": "../x"}, "uid '../x'"),
        ({"uid": ""}, "uid ''"),
        ({"namespace": "a b"}, "namespace 'a b'"),
        ({"name": 7}, "name 7"),
        ({"consumers": ["a\n"]}, "consumer"),
        ({"consumers": "pod-1"}, "wants a value of type list"),
        ({"consumers": ["x"] * 1025}, "at most 1024"),
        ({"devices": []}, "it has no device"),
        ({"devices": [7]}, "wants a table"),
        ({"devices": [{}] * 65}, "at most 64"),
    ],
)
def test_a_claim_that_is_none_is_refused(rig, changed, says):
    good = {"uid": "a", "namespace": "shop", "name": "a", "consumers": [], "devices": [rig.device()]}
    with pytest.raises(InvalidValueError, match=says):
        rig.ask("grant.prepare", **(good | changed))
    assert rig.files() == (set(), set())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"cores": 0}, "a quota is 1 to 100"),
        ({"memory": -1}, "positive number of bytes"),
        ({"class": "best"}, "best"),
        ({"latency_target_ns": 10**6}, "only online pods have one"),
        ({"share": "a/b"}, "share"),
        ({"request": ""}, "request"),
        ({"gpu": 0}, "gpu 0"),
    ],
)
def test_a_device_that_is_none_is_refused(rig, changed, says):
    with pytest.raises(InvalidValueError, match=says):
        rig.prepare("a", rig.device() | changed)


def test_a_card_that_is_not_there_is_refused(rig):
    with pytest.raises(UnknownNameError, match="there is no pGPU GPU-other here"):
        rig.prepare("a", rig.device() | {"gpu": "GPU-other"})


def test_a_claim_is_found_again_by_the_next_daemon(rig):
    before = rig.prepare("a", rig.device(cores=60, memory=GIB, share="s")), rig.listed()
    (rig.cdi / "qgpu-claim-gone.json").write_text("{}")
    (rig.cdi / ".qgpu-claim-a.json.99").write_text("{")
    (rig.cdi / "qgpu-claim-a.json").unlink()
    rig.restart()

    assert (before[0], rig.listed()) == before
    assert [path.name for path in rig.cdi.iterdir()] == ["qgpu-claim-a.json"]
    with pytest.raises(RefusedError, match="40 % is left"):
        rig.prepare("b", rig.device(cores=50))


def test_a_slow_disk_delays_only_the_claim_that_waits_for_it(rig, monkeypatch):
    plain, slow, prepared = os.fsync, threading.Event(), threading.Event()

    def fsync(fd: int) -> None:
        if ".a.json." in os.readlink(f"/proc/self/fd/{fd}"):
            slow.set()
            assert prepared.wait(60), "the other claim waits for this one"
        plain(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(rig.prepare, "a", rig.device(cores=60))
        assert slow.wait(60)
        rig.prepare("b", rig.device(cores=60))
        prepared.set()

        with pytest.raises(RefusedError, match="40 % is left"):
            first.result()
    assert rig.files() == ({"b"}, {"b"})
    assert [path.name for path in (rig.state / "claims").iterdir()] == ["b.json"]


def test_a_claim_dropped_just_before_it_is_kept_is_on_disk(rig):
    rig.prepare("a", rig.device(cores=60))
    prepared = rig.requests.pods.prepared
    again = prepared.by_uid["a"]
    with prepared.written(again) as new:
        rig.ask("grant.drop", uid="a")
        prepared.keep(again, new)

    assert rig.files() == ({"a"}, {"a"})


def test_a_claims_cdi_file_that_is_harmed_is_written_again(rig):
    rig.prepare("a", rig.device(share="s"))
    path = rig.cdi / "qgpu-claim-a.json"
    for harm in (path.unlink, lambda: path.write_text("{")):
        harm()
        rig.requests.pods.prepared.refresh()
        assert rig.specification("a")["devices"][0]["name"] == "a-s"


def test_a_cdi_file_that_is_current_is_left_alone(rig):
    rig.prepare("a", rig.device())
    before = (rig.cdi / "qgpu-claim-a.json").stat()
    rig.requests.pods.prepared.refresh()
    rig.prepare("a", rig.device(), consumers=("pod-1", "pod-2"))
    after = (rig.cdi / "qgpu-claim-a.json").stat()

    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_temporary_file_that_stays_stops_no_daemon(rig):
    rig.prepare("a", rig.device(cores=60))
    before = rig.listed()
    (rig.state / "claims" / ".a.json.99").mkdir()
    rig.restart()

    assert rig.listed() == before


@pytest.mark.parametrize("harm", ["", "{", "[]", '{"version": 9}', '{"version": 1}', "\xff"])
def test_a_claim_that_cannot_be_read_is_unknown(rig, harm):
    (name,) = rig.prepare("a", rig.device(cores=60))
    running = rig.container(name)
    web = rig.bind(running)
    (rig.state / "claims" / "a.json").write_text(harm, encoding="latin-1")
    rig.restart()

    assert rig.listed() == {}
    with pytest.raises(RefusedError, match="there is no prepared device a-gpu"):
        rig.bind(rig.container(name, names=("shop", "other", "model")))
    assert rig.outside()["cores"] == 60, "its container counts by what it has"
    rig.prepare("a", rig.device(cores=60))
    assert rig.outside()["cores"] == 0
    assert rig.listed()["a"]["pods"] == [web]


def test_a_container_that_loses_one_of_two_claims_goes_on(rig):
    both = [*rig.prepare("a", rig.device(cores=20, memory=GIB)), *rig.prepare("b", rig.device(cores=30, memory=GIB))]
    web = rig.bind(rig.container(*both))
    (rig.state / "claims" / "b.json").unlink()
    rig.restart()
    rig.requests.reap()

    assert rig.grant(web) == ("offline", 50, 2 * GIB)
    assert rig.outside() == {"cores": 50, "memory": 2 * GIB}
    with pytest.raises(RefusedError, match="30 % is left"):
        rig.prepare("c", rig.device(cores=31))


def test_a_claim_of_a_card_that_is_gone_is_kept(rig):
    (name,) = rig.prepare("a", rig.device(1, cores=60, memory=GIB))
    path = rig.state / "claims" / "a.json"
    path.write_text(path.read_text().replace(rig.uuids[1], "GPU-gone"))
    rig.restart()

    assert rig.listed()["a"]["devices"][0]["gpu"] == "GPU-gone"
    assert "deviceNodes" not in rig.specification("a")["devices"][0]["containerEdits"]
    with pytest.raises(RefusedError, match="card GPU-gone is gone"):
        rig.bind(rig.container(name))
    rig.prepare("b", rig.device(1, cores=100))
    path.write_text(path.read_text().replace("GPU-gone", rig.uuids[1]))
    rig.ask("grant.drop", uid="b")
    rig.restart()
    with pytest.raises(RefusedError, match="40 % is left"):
        rig.prepare("b", rig.device(1, cores=100))


def test_a_full_disk_prepares_nothing(rig, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qgpu.linux.atomic_file.os.fsync", full)
    with pytest.raises(PermissionDeniedError, match="No space left on device; the claim is not prepared"):
        rig.prepare("a", rig.device(cores=60))
    monkeypatch.undo()

    assert rig.listed() == {}
    assert rig.files() == (set(), set())


def test_without_a_cdi_file_nothing_is_prepared(rig):
    rig.cdi.parent.mkdir(exist_ok=True)
    rig.cdi.write_text("a file where the directory should be")
    with pytest.raises(PermissionDeniedError, match="choose another directory"):
        rig.prepare("a", rig.device(cores=60))
    rig.cdi.unlink()
    rig.prepare("b", rig.device(cores=100))

    assert set(rig.listed()) == {"b"}


def test_preparation_and_end_of_a_claim_are_recorded(rig):
    rig.prepare("a", rig.device())
    for _ in range(2):
        rig.ask("grant.drop", uid="a", name="forged", grants={"0": {"cores": 100}})
    found = rig.ask("events")["events"]

    assert [(each["what"], each["uid"]) for each in found] == [("claim prepared", "a"), ("claim dropped", "a")]
    assert not {"grants", "old", "new"} & {key for each in found for key in each}
    assert "forged" not in str(found)


@pytest.mark.parametrize("uid", ["", "../x", "x" * 64, 7])
def test_a_drop_of_what_is_no_uid_is_refused(rig, uid):
    with pytest.raises(InvalidValueError, match="uid"):
        rig.ask("grant.drop", uid=uid)
