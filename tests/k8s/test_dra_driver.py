"""The driver as a process, between a kubelet, an API server and a real qgpud on the simulator."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator

import pytest

from tests.k8s.container import Container
from tests.k8s.rivals import PLACES, listener
from tests.k8s.wire import MESSAGES
from tests.k8s.world import GI, NODE, World, card, device, parameters, result

HEALTHY, UNHEALTHY = 1, 2
RIVAL = "device-plugins/vcore.sock"


@pytest.fixture(scope="module")
def running() -> Iterator[World]:
    made = World("--resync", "0.2").start()
    yield made
    made.close()


@pytest.fixture
def world(running: World) -> Iterator[World]:
    """A node on which everything runs and nothing is claimed, before and after."""
    running.eventually(running.api.slice)
    yield running
    running.api.node_authorizer = running.api.gate = True
    for kind in ("resourceclaims", "pods"):
        for each in running.api.of(kind):
            running.api.delete(kind, each["metadata"]["namespace"], each["metadata"]["name"])
    running.kubelet.checkpoint.clear()
    running.eventually(lambda: not running.grants())


def test_prepared_claim_is_a_grant_with_a_cdi_file(world: World) -> None:
    claim = world.claim(result(0, memory="20Gi", cores="40", share="5a"), pods=("pod-a",))
    uid = claim["metadata"]["uid"]

    assert world.kubelet.prepare(claim, "pod-a") == ""
    (found,) = world.kubelet.checkpoint[uid].devices or ()
    grant = world.grants()[uid]

    assert (found.device_name, found.pool_name, list(found.request_names)) == (device(0), NODE, ["gpu"])
    assert found.share_id == "5a"
    assert set(found.cdi_device_ids) <= world.files()
    assert grant["consumers"] == ["pod-a"]
    assert [(each["gpu"], each["cores"], each["memory"]) for each in grant["devices"]] == [(card(0), 40, 20 * GI)]
    assert world.kubelet.unprepare(uid) == ""
    assert uid not in world.grants()
    assert not set(found.cdi_device_ids) & world.files()


def test_kubelet_of_133_speaks_v1beta1(world: World) -> None:
    claim = world.claim(result(0), pods=("pod-a",))
    world.kubelet.speaks = ("v1beta1",)
    try:
        assert world.kubelet.prepare(claim, "pod-a") == ""
    finally:
        world.kubelet.speaks = ("v1", "v1beta1")

    (found,) = world.kubelet.checkpoint[claim["metadata"]["uid"]].devices or ()
    assert set(found.cdi_device_ids) <= world.files()


def test_claim_of_several_shares_names_each_of_them(world: World) -> None:
    claim = world.claim(result(0, share="a"), result(0, share="b"), result(1, share="c", request="far"), pods=("p",))

    assert world.kubelet.prepare(claim, "p") == ""
    found = world.kubelet.checkpoint[claim["metadata"]["uid"]].devices or ()

    assert [(each.device_name, each.share_id) for each in found] == [
        (device(0), "a"),
        (device(0), "b"),
        (device(1), "c"),
    ]
    assert len({name for each in found for name in each.cdi_device_ids}) == 3


def test_chosen_alternative_belongs_to_its_request(world: World) -> None:
    claim = world.claim(result(0, request="gpu/small"), pods=("p",))

    assert world.kubelet.prepare(claim, "p") == ""
    (found,) = world.kubelet.checkpoint[claim["metadata"]["uid"]].devices or ()

    assert list(found.request_names) == ["gpu"]


def test_prepare_again_answers_the_same(world: World) -> None:
    claim = world.claim(result(0), pods=("p",))
    assert world.kubelet.prepare(claim, "p") == ""
    known = world.kubelet.checkpoint[claim["metadata"]["uid"]]
    first, known.devices = known.devices, None

    assert world.kubelet.prepare(claim, "p") == ""
    assert known.devices == first


def test_claims_of_one_call_succeed_and_fail_on_their_own(world: World) -> None:
    good, bad = world.claim(result(0)), world.claim(result(0) | {"consumedCapacity": {}})
    stub, messages = world.kubelet.stub()
    asked = [
        messages.Claim(namespace="team", name=each["metadata"]["name"], uid=each["metadata"]["uid"])
        for each in (good, bad)
    ]
    answer = stub.NodePrepareResources(messages.NodePrepareResourcesRequest(claims=asked)).claims

    assert not answer[good["metadata"]["uid"]].error
    assert "DRAConsumableCapacity" in answer[bad["metadata"]["uid"]].error
    assert "\n" not in answer[bad["metadata"]["uid"]].error


def test_what_does_not_fit_is_refused_until_it_does(world: World) -> None:
    first = world.claim(result(0, cores="70"), pods=("p",))
    second = world.claim(result(0, cores="70"), pods=("q",))
    assert world.kubelet.prepare(first, "p") == ""

    assert "30 % is left to grant" in world.kubelet.prepare(second, "q")
    assert world.kubelet.unprepare(first["metadata"]["uid"]) == ""
    assert world.kubelet.prepare(second, "q") == ""


def test_class_online_comes_from_the_device_class(world: World) -> None:
    online = world.claim(result(0), pods=("p",), configurations=(parameters("FromClass", **{"class": "online"}),))
    forged = world.claim(result(0), pods=("q",), configurations=(parameters("FromClaim", **{"class": "online"}),))

    assert world.kubelet.prepare(online, "p") == ""
    assert world.grants()[online["metadata"]["uid"]]["devices"][0]["class"] == "online"
    assert "DeviceClass" in world.kubelet.prepare(forged, "q")
    assert forged["metadata"]["uid"] not in world.grants()


def test_claim_with_a_policy_waits_until_its_card_has_it(world: World) -> None:
    asked = parameters("FromClaim", policy="fixed-share")
    claim = world.claim(result(1, cores="10"), pods=("p",), configurations=(asked,))
    uid = claim["metadata"]["uid"]

    refusal = world.kubelet.prepare(claim, "p")
    assert "pGPU 1 has policy burst-share, and the claim asks for fixed-share" in refusal
    assert uid not in world.grants()
    assert world.daemon is not None
    assert world.daemon.ctl(*shlex.split(refusal.partition(": qgpuctl ")[2])).returncode == 0
    try:
        assert world.kubelet.prepare(claim, "p") == ""
    finally:
        world.daemon.ctl("gpu", "policy", "set", "1", "burst-share")
    world.kubelet.checkpoint[uid].devices = None
    assert world.kubelet.prepare(claim, "p") == ""  # it was prepared before


def test_claim_that_was_replaced_is_not_prepared(world: World) -> None:
    claim = world.claim(result(0), name="same", pods=("p",))
    world.api.delete("resourceclaims", "team", "same")
    world.claim(result(0), name="same", pods=("q",))

    assert "replaced by another" in world.kubelet.prepare(claim, "p")
    assert not world.grants()


def test_unprepare_of_an_unknown_claim_succeeds(world: World) -> None:
    claim = world.claim(result(0), pods=("p",))
    assert world.kubelet.prepare(claim, "p") == ""
    world.qgpud.drop(claim["metadata"]["uid"])

    assert world.kubelet.unprepare(claim["metadata"]["uid"]) == ""


@pytest.mark.root
def test_claim_stays_while_a_process_uses_it(world: World) -> None:
    claim = world.claim(result(0, memory="100Gi"), pods=("p",))
    uid = claim["metadata"]["uid"]
    assert world.kubelet.prepare(claim, "p") == ""
    container = Container(world, "p", world.kubelet.names(uid))
    try:
        container.bind()
        world.forget(claim)  # by force: the processes are still there

        assert "still uses it" in world.kubelet.unprepare(uid)
        assert "left to grant" in world.kubelet.prepare(world.claim(result(0, memory="100Gi"), pods=("q",)), "q")
    finally:
        container.kill()
    assert world.kubelet.unprepare(uid) == ""


@pytest.mark.root
def test_pod_that_joins_a_shared_claim_may_use_it(world: World) -> None:
    claim = world.claim(result(0), pods=("p",), shared=True)
    uid = claim["metadata"]["uid"]
    assert world.kubelet.prepare(claim, "p") == ""
    claim["status"]["reservedFor"].append({"resource": "pods", "name": "q", "uid": "q"})
    world.pod("q", claim["metadata"]["name"])
    world.api.put("resourceclaims", "team", claim["metadata"]["name"], claim)
    assert world.kubelet.prepare(claim, "q") == ""  # which the kubelet does not pass on

    world.eventually(lambda: sorted(world.grants()[uid]["consumers"]) == ["p", "q"])
    container = Container(world, "q", world.kubelet.names(uid))
    try:
        container.bind()
    finally:
        container.kill()


def test_slice_offers_both_cards(world: World) -> None:
    found = world.devices()

    assert [each["name"] for each in found] == [device(0), device(1)]
    assert all(each["allowMultipleAllocations"] for each in found)
    assert not world.api.invalid


def test_slice_belongs_to_the_node(world: World) -> None:
    owner = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid"}
    found = world.api.slice()

    assert found is not None
    assert found["metadata"]["ownerReferences"] == [owner]


def test_slice_belongs_to_the_node_that_joined_again(world: World) -> None:
    world.api.delete("nodes", "", NODE)
    world.api.put("nodes", "", NODE, {"metadata": {"name": NODE, "uid": "new-uid"}})
    world.api.wipe_slices()  # the garbage collector does, when the owner is gone
    try:
        found = world.eventually(world.api.slice)
        assert [owner["uid"] for owner in found["metadata"]["ownerReferences"]] == ["new-uid"]
    finally:
        world.api.put("nodes", "", NODE, {"metadata": {"name": NODE, "uid": "node-uid"}})
        world.api.wipe_slices()


def test_slice_comes_back_when_the_kubelet_restarts(world: World) -> None:
    before, count = world.api.slice(), world.kubelet.registered
    assert before is not None
    world.kubelet.stop()
    world.kubelet.start()

    world.eventually(lambda: world.kubelet.registered > count and world.kubelet.wiped)
    after = world.eventually(world.api.slice)
    assert after["spec"]["devices"] == before["spec"]["devices"]


def test_deleted_slice_comes_back(world: World) -> None:
    world.api.wipe_slices()

    world.eventually(world.api.slice)


def test_slice_that_somebody_changed_is_set_right(world: World) -> None:
    found = world.api.slice()
    assert found is not None
    generation = found["spec"]["pool"]["generation"]
    spec = found["spec"] | {"devices": found["spec"]["devices"][:1]}
    world.api.put("resourceslices", "", found["metadata"]["name"], found | {"spec": spec})

    world.eventually(lambda: len(world.devices()) == 2)
    again = world.api.slice()
    assert again is not None
    assert again["spec"]["pool"]["generation"] == generation + 1


def test_policy_of_a_card_reaches_the_slice(world: World) -> None:
    assert world.daemon is not None
    assert world.daemon.ctl("gpu", "policy", "set", "1", "fixed-share").returncode == 0
    try:
        world.eventually(lambda: world.devices()[1]["attributes"]["policy"]["string"] == "fixed-share")
        assert world.devices()[1]["capacity"]["cores"]["requestPolicy"]["validRange"]["min"] == "1"
    finally:
        world.daemon.ctl("gpu", "policy", "set", "1", "burst-share")
    world.eventually(lambda: world.devices()[1]["attributes"]["policy"]["string"] == "burst-share")


def test_what_a_pod_outside_holds_is_not_offered(world: World) -> None:
    assert world.daemon is not None
    pod = world.daemon.start("run", "--cores", "30", "--memory", "41GiB", "--", "sleep", "60")
    try:
        cards = [device(0), device(1)]
        held = world.eventually(
            lambda: [
                cards.index(each["name"]) for each in world.devices() if each["capacity"]["cores"]["value"] == "70"
            ]
        )
        assert world.devices()[held[0]]["capacity"]["memory"]["value"] == "101888Mi"  # 141 GiB - 41 GiB - 512 MiB
    finally:
        pod.send_signal(signal.SIGTERM)
        pod.communicate(timeout=60)
    world.eventually(lambda: all(each["capacity"]["cores"]["value"] == "100" for each in world.devices()))


def test_drain_annotation_taints_the_card(world: World) -> None:
    def annotate(value: str) -> None:
        world.api.put("nodes", "", NODE, {"metadata": {"uid": "node-uid", "annotations": {"qgpu.io/drain": value}}})

    annotate(f"{card(1)}:NoExecute")
    world.eventually(lambda: world.devices()[1].get("taints"))
    assert world.devices()[1]["taints"][0]["effect"] == "NoExecute"
    assert not world.devices()[0].get("taints")
    annotate("")
    world.eventually(lambda: not world.devices()[1].get("taints"))


def test_health_of_all_cards_is_streamed(world: World) -> None:
    found = {each.device.device_name: each.health for each in next(world.kubelet.health()).devices}

    assert found == {device(0): HEALTHY, device(1): HEALTHY}
    assert MESSAGES["dra_health"].HealthStatus.Name(UNHEALTHY) == "UNHEALTHY"


def test_grant_of_a_claim_deleted_by_force_is_given_up(world: World) -> None:
    claim = world.claim(result(0), pods=("p",))
    assert world.kubelet.prepare(claim, "p") == ""
    world.forget(claim)
    world.kubelet.checkpoint.clear()

    world.eventually(lambda: not world.grants())


def test_grant_of_a_claim_that_lost_its_card_is_given_up(world: World) -> None:
    claim = world.claim(result(0), pods=("p",))
    assert world.kubelet.prepare(claim, "p") == ""
    world.api.put("resourceclaims", "team", claim["metadata"]["name"], claim | {"status": {}})

    world.eventually(lambda: not world.grants())


def test_grants_are_kept_where_the_nodes_name_is_wrong(world: World) -> None:
    claim = world.claim(result(0), pods=("p",))
    uid = claim["metadata"]["uid"]
    assert world.kubelet.prepare(claim, "p") == ""
    world.kill_driver()
    world.start_driver("--node-name", "node-2")  # the name of another node of the cluster
    try:
        said = f"its card is in pool {NODE}, and this is node node-2; start qgpu-k8s with this node's --node-name"
        world.eventually(lambda: said in world.log)
        assert uid in world.grants()
    finally:
        world.kill_driver()
        world.registered_driver()


def test_hidden_claim_that_the_kubelet_has_is_kept(world: World) -> None:
    claim = world.claim(result(0), pods=("p",))
    uid = claim["metadata"]["uid"]
    assert world.kubelet.prepare(claim, "p") == ""
    world.api.delete("pods", "team", "p")  # as just after the API server's start
    reads = world.api.claim_reads

    world.eventually(lambda: world.api.claim_reads > reads + 5)
    assert uid in world.grants()


def test_api_server_without_the_gate_gets_no_slice(world: World) -> None:
    world.api.gate = False
    world.api.wipe_slices()

    world.eventually(lambda: "enable the feature gate DRAConsumableCapacity" in world.log)
    assert world.api.slice() is None
    world.kill_driver()
    world.api.gate = True
    world.registered_driver()
    world.eventually(world.api.slice)


def test_removed_socket_is_made_again(world: World) -> None:
    count = world.kubelet.registered
    world.kubelet.directory.registration_socket.unlink()
    world.kubelet.directory.dra_socket.unlink()

    world.eventually(lambda: world.kubelet.registered > count)
    assert world.kubelet.prepare(world.claim(result(0), pods=("p",)), "p") == ""


def test_claims_wait_for_a_daemon_that_is_away(world: World) -> None:
    claim = world.claim(result(0), pods=("p",))
    world.kill_daemon()

    assert "; start it: " in world.kubelet.prepare(claim, "p")
    world.start_daemon()
    assert world.kubelet.prepare(claim, "p") == ""


def test_claims_wait_for_an_api_server_that_is_away(world: World) -> None:
    claim = world.claim(result(0), pods=("p",))
    world.api.stop()

    assert "no answer from the API server" in world.kubelet.prepare(claim, "p")
    world.api.start()
    world.eventually(lambda: not world.kubelet.prepare(claim, "p"))


def test_second_driver_on_a_node_is_refused(world: World) -> None:
    log = len(world.log)
    first = world.driver
    world.start_driver()
    second, world.driver = world.driver, first
    assert second is not None

    assert second.wait(60) == 23
    assert "another qgpu-k8s serves this node" in world.log[log:]


@pytest.mark.parametrize(
    "place",
    [
        "plugins/gpu.nvidia.com/dra.sock",
        "plugins_registry/hami-core-gpu.project-hami.io-reg.sock",
        "device-plugins/nvidia-gpu.sock",
    ],
)
def test_rival_driver_is_refused_in_one_line(world: World, place: str) -> None:
    path = world.kubelet.root / place
    log = len(world.log)
    world.kill_driver()
    with listener(path):
        world.start_driver()
        assert world.driver is not None
        assert world.driver.wait(60) == 21
    assert f"{path}: {PLACES[place]} advertises this node's cards too; remove it" in world.log[log:]
    assert world.log[log:].strip().count("\n") == 0
    world.registered_driver()  # the socket is there still, but nobody listens
    path.unlink()


def test_rival_that_comes_later_stops_new_pods(world: World) -> None:
    path = world.kubelet.root / "device-plugins/nvidia-gpu.sock"
    with listener(path):
        world.eventually(lambda: all(each.get("taints") for each in world.devices()))
        assert world.devices()[0]["taints"][0]["key"] == "qgpu.io/conflict"
    world.eventually(lambda: not any(each.get("taints") for each in world.devices()))
    path.unlink()


def test_new_claims_wait_until_the_rival_has_gone(world: World) -> None:
    before, new = world.claim(result(0), pods=("p",)), world.claim(result(1), pods=("q",))
    assert world.kubelet.prepare(before, "p") == ""
    known = world.kubelet.checkpoint[before["metadata"]["uid"]]
    first, known.devices = known.devices, None
    path = world.kubelet.root / RIVAL
    with listener(path):
        world.eventually(lambda: all(each.get("taints") for each in world.devices()))

        refusal = world.kubelet.prepare(new, "q")  # as of a claim that tolerates the taint
        assert refusal.startswith(
            f"claim team/{new['metadata']['name']}: not prepared; {path}: {PLACES[RIVAL]} advertises"
        )
        assert "remove it from this node" in refusal
        assert "\n" not in refusal
        assert world.grants().keys() == {before["metadata"]["uid"]}
        assert world.kubelet.prepare(before, "p") == ""  # as after the kubelet lost its record
        assert known.devices == first
    path.unlink()

    world.eventually(lambda: not world.kubelet.prepare(new, "q"))


def test_ended_driver_removes_its_sockets(world: World) -> None:
    assert world.kill_driver(signal.SIGTERM) == 0
    assert not world.kubelet.directory.registration_socket.exists()
    assert not world.kubelet.directory.dra_socket.exists()
    world.registered_driver()


def test_sockets_are_for_root_alone(world: World) -> None:
    for path in (world.kubelet.directory.registration_socket, world.kubelet.directory.dra_socket):
        assert os.stat(path).st_mode & 0o077 == 0
