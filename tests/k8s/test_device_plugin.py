"""The device plugin as a process, between a kubelet and a real qgpud on the simulator."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.k8s.container import Container
from tests.k8s.kubelet import INIT
from tests.k8s.rivals import listener
from tests.k8s.wire import MESSAGES
from tests.k8s.world import GI, World, card, result

CORES, ONLINE = "qgpu.io/cores", "qgpu.io/online-cores"
#: Names for time and memory, the bytes of a unit of memory, and how many units 40 GiB are.
ALIASES = {
    "qgpu": ("tke.cloud.tencent.com/qgpu-core", "tke.cloud.tencent.com/qgpu-memory", GI),
    "hami": ("nvidia.com/gpucores", "nvidia.com/gpumem", 8 * 1024**2),
    "vcuda": ("tencent.com/vcuda-core", "tencent.com/vcuda-memory", 256 * 1024**2),
}
OPTIONS = ("--patience", "0.5", "--memory-factor", "8", *(word for name in ALIASES for word in ("--alias", name)))
PER_CENT = (141 * GI - GI // 2) // 100 // 1024**2 * 1024**2


@pytest.fixture(scope="module")
def running() -> Iterator[World]:
    made = World(*OPTIONS, mode="device-plugin").start()
    yield made
    made.close()


@pytest.fixture
def world(running: World) -> Iterator[World]:
    """A node on which everything runs and no unit is held, before and after."""

    def idle() -> bool:
        units = running.kubelet.units.copy()
        return (
            not running.grants()
            and len(units) == 2 + 2 * len(ALIASES)
            and all(set(health.values()) == {"Healthy"} for health in units.values())
        )

    running.eventually(idle)
    yield running
    running.kubelet.held_units.clear()
    running.eventually(idle)


def only(world: World) -> tuple[str, str, int | None, int]:
    """What all grants give together: card, class, cores, memory."""
    return share(world, *(device["cdi"] for grant in world.grants().values() for device in grant["devices"]))


def share(world: World, *names: str) -> tuple[str, str, int | None, int]:
    """What a container with these CDI devices gets: card, class, cores, memory."""
    devices = [device for grant in world.grants().values() for device in grant["devices"] if device["cdi"] in names]
    ((gpu, pod_class),) = {(device["gpu"], device["class"]) for device in devices}
    cores = sum(device["cores"] or 0 for device in devices)
    return gpu, pod_class, cores or None, sum(device["memory"] for device in devices)


def names_of(*given: Any) -> list[str]:
    """The CDI devices that the kubelet was given for a container."""
    return [device.name for each in given for device in each.cdi_devices]


@pytest.mark.parametrize(("resource", "pod_class"), [(CORES, "offline"), (ONLINE, "online")])
def test_units_give_time_and_memory_in_proportion(world: World, resource: str, pod_class: str) -> None:
    got = world.kubelet.allocate(resource, 30, "p")
    (device,) = got.cdi_devices

    assert only(world) == (card(0), pod_class, 30, 30 * PER_CENT)
    assert device.name in world.files()
    assert list(got.annotations.values()) == [device.name]
    assert all(key.startswith("cdi.k8s.io/") and len(key) <= 74 for key in got.annotations)


def test_units_of_two_cards_are_refused(world: World) -> None:
    with pytest.raises(grpc.RpcError, match="a container's share lies on one card"):
        world.kubelet.allocate(CORES, 2, "p", units=[f"{card(0)}::1", f"{card(1)}::1"])
    assert not world.grants()


def test_kubelet_is_told_units_of_one_card(world: World) -> None:
    for number in range(4):
        world.kubelet.allocate(CORES, 40, f"p{number}")

    assert sorted(grant["devices"][0]["cores"] for grant in world.grants().values()) == [40] * 4


def test_what_one_resource_sells_is_gone_from_the_others(world: World) -> None:
    world.kubelet.allocate(CORES, 70, "p")

    world.eventually(lambda: world.kubelet.healthy(ONLINE, card(0)) == 30)
    assert world.kubelet.healthy(CORES, card(0)) == 100
    assert world.kubelet.healthy(ONLINE, card(1)) == 100
    world.eventually(lambda: world.kubelet.healthy("nvidia.com/gpucores", card(0)) == 30)


def test_what_a_pod_outside_holds_is_not_sold(world: World) -> None:
    assert world.daemon is not None
    pod = world.daemon.start("run", "--cores", "25", "--", "sleep", "60")
    try:
        world.eventually(lambda: world.kubelet.healthy(CORES) == 175)
    finally:
        pod.send_signal(signal.SIGTERM)
        pod.communicate(timeout=60)
    world.eventually(lambda: world.kubelet.healthy(CORES) == 200)


def test_freed_units_are_given_up_after_a_while(world: World) -> None:
    world.kubelet.allocate(CORES, 30, "p")
    world.kubelet.release("p")

    world.eventually(lambda: not world.grants())


def test_units_allocated_again_are_given_up_at_once(world: World) -> None:
    world.kubelet.allocate(CORES, 30, "p", units=[f"{card(0)}::{number}" for number in range(30)])
    world.kubelet.release("p")
    world.kubelet.allocate(CORES, 90, "q", units=[f"{card(0)}::{number}" for number in range(90)])

    assert only(world)[2] == 90


@pytest.mark.root
def test_units_that_a_process_uses_are_not_sold_again(world: World) -> None:
    units = [f"{card(0)}::{number}" for number in range(60)]
    got = world.kubelet.allocate(CORES, 60, "p", units=units)
    container = Container(world, "any-pod", [device.name for device in got.cdi_devices])
    try:
        container.bind()
        world.kubelet.release("p")
        with pytest.raises(grpc.RpcError, match="uses it"):
            world.kubelet.allocate(CORES, 60, "q", units=units)
        assert only(world)[2] == 60
    finally:
        container.kill()


def test_restart_of_plugin_and_daemon_keeps_the_grants(world: World) -> None:
    world.kubelet.allocate(CORES, 30, "p")
    before = world.grants()
    world.kill_driver()
    world.kill_daemon()
    world.start_daemon()
    world.registered_driver()

    world.eventually(lambda: world.kubelet.healthy(ONLINE, card(0)) == 70)
    assert world.grants() == before


def test_plugin_registers_again_after_the_kubelet_restarts(world: World) -> None:
    world.kubelet.allocate(CORES, 30, "p")
    before, count = world.grants(), world.kubelet.registered
    world.kubelet.stop()
    world.kubelet.start()

    world.eventually(lambda: world.kubelet.registered == count + 8)
    world.eventually(lambda: world.kubelet.healthy(CORES, card(0)) == 100)
    world.kubelet.allocate(CORES, 40, "q")
    assert before.items() <= world.grants().items()


def test_grant_that_was_lost_is_prepared_again(world: World) -> None:
    world.kubelet.allocate(CORES, 30, "p")
    before = world.grants()
    for uid in before:
        world.qgpud.drop(uid)

    world.eventually(lambda: world.grants() == before)


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("first", ["cores", "memory"])
def test_alias_gives_a_container_both_halves(world: World, alias: str, first: str) -> None:
    cores, memory, unit = ALIASES[alias]
    asked = [(cores, 35), (memory, 40 * GI // unit)]
    got = [world.kubelet.allocate(*each, "p") for each in (asked if first == "cores" else reversed(asked))]

    assert share(world, *names_of(*got)) == only(world) == (card(0), "offline", 35, 40 * GI)
    world.kubelet.pre_start("p")
    assert only(world) == (card(0), "offline", 35, 40 * GI)
    world.eventually(lambda: world.kubelet.healthy(CORES, card(0)) == 65)


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("first", ["cores", "memory"])
def test_alias_gives_all_memory_of_a_card_beside_cores(world: World, alias: str, first: str) -> None:
    cores, memory, unit = ALIASES[alias]
    asked = [(cores, 100), (memory, world.kubelet.healthy(memory, card(1)))]
    units = {name: [f"{card(1)}::{number}" for number in range(count)] for name, count in asked}
    for name, count in asked if first == "cores" else reversed(asked):
        world.kubelet.allocate(name, count, "p", units=units[name])
    world.kubelet.pre_start("p")

    assert only(world) == (card(1), "offline", 100, asked[1][1] * unit)


@pytest.mark.parametrize("alias", ALIASES)
def test_alias_of_memory_alone_has_no_quota(world: World, alias: str) -> None:
    _, memory, unit = ALIASES[alias]
    world.kubelet.allocate(memory, 4 * GI // unit, "p")

    assert only(world) == (card(0), "offline", None, 4 * GI)


@pytest.mark.parametrize("alias", ALIASES)
def test_alias_of_cores_alone_has_its_part_of_memory(world: World, alias: str) -> None:
    world.kubelet.allocate(ALIASES[alias][0], 10, "p")

    assert only(world) == (card(0), "offline", 10, 10 * PER_CENT)


def test_half_that_was_given_up_is_not_joined_to_a_new_one(world: World) -> None:
    cores, memory, unit = ALIASES["qgpu"]
    world.kubelet.allocate(memory, 4 * GI // unit, "p")
    world.kubelet.release("p")
    world.eventually(lambda: not world.grants())
    world.kubelet.allocate(cores, 10, "q")

    assert only(world) == (card(0), "offline", 10, 10 * PER_CENT)


def test_halves_on_two_cards_are_refused(world: World) -> None:
    cores, memory, _ = ALIASES["qgpu"]
    world.kubelet.allocate(cores, 5, "p", units=[f"{card(0)}::{number}" for number in range(5)])

    with pytest.raises(grpc.RpcError, match="a container's share lies on one card"):
        world.kubelet.allocate(memory, 1, "p", units=[f"{card(1)}::0"])


def test_second_half_follows_the_first_to_its_card(world: World) -> None:
    cores, memory, unit = ALIASES["vcuda"]
    world.kubelet.allocate(cores, 5, "p", units=[f"{card(1)}::{number}" for number in range(5)])
    world.kubelet.allocate(memory, GI // unit, "p")

    assert only(world) == (card(1), "offline", 5, GI)


#: What a container asks for, in the order in which the kubelet allocates it: per cent, and GiB.
ASKED = st.sampled_from(
    [(("cores", 10),), (("memory", 2),), (("cores", 7), ("memory", 3)), (("memory", 3), ("cores", 7))]
)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(alias=st.sampled_from(sorted(ALIASES)), pods=st.lists(ASKED, min_size=2, max_size=4), data=st.data())
def test_containers_allocated_back_to_back_get_their_own(
    world: World, alias: str, pods: list[tuple[tuple[str, int], ...]], data: st.DataObject
) -> None:
    cores, memory, unit = ALIASES[alias]
    world.kubelet.held_units.clear()  # of an example that failed
    world.eventually(lambda: not world.grants())
    names: dict[str, list[str]] = {}
    for number, asked in enumerate(pods):
        wanted = [(cores, count) if what == "cores" else (memory, count * GI // unit) for what, count in asked]
        names[f"p{number}"] = names_of(*(world.kubelet.allocate(*each, f"p{number}") for each in wanted))
    for pod in data.draw(st.permutations(sorted(names))):
        world.kubelet.pre_start(pod)

    for pod, asked in zip(names, map(dict, pods), strict=True):
        per_cent = asked.get("cores")
        expected = asked["memory"] * GI if "memory" in asked else (per_cent or 0) * PER_CENT
        assert share(world, *names[pod])[2:] == (per_cent, expected)
        world.kubelet.release(pod)
    world.eventually(lambda: not world.grants())


def with_init(world: World, init: int, main: int) -> tuple[str, str]:
    """Allocate a pod's init and main container units that they have in common, as the kubelet does; their devices."""
    most = [f"{card(0)}::{number}" for number in range(max(init, main))]
    given = [
        world.kubelet.allocate(CORES, count, "p", units=most[:count], container=container)
        for container, count in ((INIT, init), ("main", main))
    ]
    return names_of(given[0])[0], names_of(given[1])[0]


@pytest.mark.parametrize(("init", "main"), [(50, 30), (20, 30), (30, 30)])
def test_init_container_has_its_units_when_it_starts(world: World, init: int, main: int) -> None:
    first, then = with_init(world, init, main)
    left = 100 - max(init, main)  # nobody buys meanwhile what the other has besides
    for _ in range(2):  # the second time after the pod's node restarted
        world.kubelet.pre_start("p", INIT)
        assert share(world, first)[2:] == (init, init * PER_CENT)
        assert first in world.files()
        world.eventually(lambda: world.kubelet.healthy(ONLINE, card(0)) == left)
        world.kubelet.pre_start("p")
        assert share(world, then) == only(world) == (card(0), "offline", main, main * PER_CENT)


def test_init_container_starts_after_a_long_image_pull(world: World) -> None:
    got = world.kubelet.allocate(CORES, 50, "p", container=INIT)
    world.eventually(lambda: not world.grants())
    world.kubelet.pre_start("p", INIT)

    assert share(world, *names_of(got)) == only(world) == (card(0), "offline", 50, 50 * PER_CENT)
    assert set(names_of(got)) <= world.files()


@pytest.mark.parametrize("first", ["cores", "memory"])
def test_init_container_has_both_halves_when_it_starts(world: World, first: str) -> None:
    cores, memory, unit = ALIASES["qgpu"]

    def ask(container: str, per_cent: int, gib: int) -> list[Any]:
        asked = [(cores, per_cent), (memory, gib * GI // unit)]
        return [
            world.kubelet.allocate(
                name, count, "p", units=[f"{card(0)}::{n}" for n in range(count)], container=container
            )
            for name, count in (asked if first == "cores" else reversed(asked))
        ]

    init, main = ask(INIT, 20, 40), ask("main", 35, 10)
    world.kubelet.pre_start("p", INIT)
    assert share(world, *names_of(*init))[2:] == (20, 40 * GI)
    world.kubelet.pre_start("p")
    assert share(world, *names_of(*main)) == only(world) == (card(0), "offline", 35, 10 * GI)


@pytest.mark.root
def test_units_that_an_init_container_uses_stay_its_own(world: World) -> None:
    first, _ = with_init(world, 50, 30)
    world.kubelet.pre_start("p", INIT)
    container = Container(world, "any-pod", [first])
    try:
        container.bind()
        with pytest.raises(grpc.RpcError, match="uses it"):
            world.kubelet.pre_start("p")
        assert share(world, first)[2] == 50
    finally:
        container.kill()
    world.kubelet.pre_start("p")
    assert only(world)[2] == 30


def test_container_that_the_kubelet_does_not_list_starts() -> None:
    cores, memory, unit = ALIASES["qgpu"]
    made = World("--alias", "qgpu", mode="device-plugin").start()
    try:
        got = [made.kubelet.allocate(cores, 20, "p"), made.kubelet.allocate(memory, 4 * GI // unit, "p")]
        units = made.kubelet.held_units["team", "p", "main", cores]
        made.kubelet.release("p")  # as for an init container
        asked = MESSAGES["device_plugin"].PreStartContainerRequest(devices_ids=units)
        made.kubelet.device_plugins[cores].PreStartContainer(asked)

        assert share(made, *names_of(*got)) == (card(0), "offline", 20, 4 * GI)
    finally:
        made.close()


def test_no_container_starts_while_the_kubelet_does_not_list(world: World) -> None:
    cores, _, _ = ALIASES["qgpu"]
    world.kubelet.allocate(cores, 20, "p")
    path = world.kubelet.directory.pod_resources
    path.rename(path.with_suffix(".away"))
    try:
        with pytest.raises(grpc.RpcError, match="is the kubelet running"):
            world.kubelet.pre_start("p")
    finally:
        path.with_suffix(".away").rename(path)
    world.kubelet.pre_start("p")


def test_units_of_both_halves_are_known_after_a_restart(world: World) -> None:
    cores, memory, _ = ALIASES["qgpu"]
    world.kubelet.allocate(cores, 20, "p")
    world.kubelet.allocate(memory, 100, "p")
    before = world.grants()
    world.kill_driver()
    world.registered_driver()

    world.eventually(lambda: world.kubelet.healthy(memory, card(0)) == 140)
    assert world.grants() == before


def test_rival_plugin_takes_every_unit_off_sale(world: World) -> None:
    path = world.kubelet.directory.device_plugins / "nvidia-gpu.sock"
    with listener(path):
        world.eventually(lambda: world.kubelet.healthy(CORES) == 0)
    path.unlink()


def test_no_units_are_allocated_beside_a_rival(world: World) -> None:
    units = [f"{card(0)}::{number}" for number in range(30)]
    world.kubelet.allocate(CORES, 30, "p", units=units)
    before = world.grants()
    path = world.kubelet.directory.device_plugins / "vmemory.sock"
    with listener(path):
        world.eventually(lambda: world.kubelet.healthy(CORES) == 30)

        for asked in (units, [f"{card(1)}::0"]):
            with pytest.raises(grpc.RpcError, match="GPU manager advertises this node's cards too; remove it"):
                world.kubelet.allocate(CORES, len(asked), "q", units=asked)
        assert world.grants() == before
    path.unlink()


def test_dra_driver_beside_the_plugin_is_refused(world: World) -> None:
    plugin, world.driver = world.driver, None
    mode, world.mode = world.mode, "dra"
    options, world.options = world.options, ()
    try:
        world.start_driver()
        second, world.driver = world.driver, plugin
        assert second is not None
        assert second.wait(60) == 23
    finally:
        world.mode, world.options, world.driver = mode, options, plugin


def test_too_many_units_are_refused_with_the_remedy() -> None:
    made = World("--alias", "hami", mode="device-plugin")
    try:
        made.start()
        assert made.driver is not None
        assert made.driver.wait(60) == 2
        assert "nvidia.com/gpumem: 287744 units" in made.log
        assert "--memory-factor 6" in made.log
    finally:
        made.close()


@pytest.mark.root
def test_mode_does_not_change_under_running_pods() -> None:
    made = World(mode="dra", gpus=1).start()
    try:
        claim = made.claim(result(0), pods=("p",))
        assert made.kubelet.prepare(claim, "p") == ""
        container = Container(made, "p", made.kubelet.names(claim["metadata"]["uid"]))
        container.bind()
        made.kill_driver()
        made.mode = "device-plugin"
        made.start_driver()
        assert made.driver is not None
        assert made.driver.wait(60) == 21
        assert "drain the node before its mode changes" in made.log
        container.kill()
        made.registered_driver()
        made.eventually(lambda: not made.grants())
    finally:
        made.close()
