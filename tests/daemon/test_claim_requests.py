"""Claims are prepared before their containers, and their containers get what they hold and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace

import pytest

from qgpu.config import Config, GpuSettings
from qgpu.daemon import claim_requests, pods
from qgpu.errors import PermissionDeniedError, RefusedError
from qgpu.linux import cgroup
from qgpu.model.container_labels import ContainerLabels
from tests.daemon.claim_rig import GIB, MEMORY

pytestmark = pytest.mark.root


def test_a_claim_holds_its_part_before_any_container_runs(rig):
    rig.prepare("a", rig.device(cores=60, memory=MEMORY // 2))

    with pytest.raises(RefusedError, match="50 % for pod x does not fit; 40 % is left"):
        rig.ask("pod.create", name="x", grants={"0": {"cores": 50}})
    with pytest.raises(RefusedError, match="for claim shop/claim-b does not fit"):
        rig.prepare("b", rig.device(memory=MEMORY // 2 + 1))
    assert rig.outside() == {"cores": 0, "memory": 0}


def test_what_pods_have_is_not_prepared_for_a_claim(rig):
    rig.ask("pod.create", name="x", grants={"0": {"cores": 50, "memory": GIB}})

    with pytest.raises(RefusedError, match="60 % for claim shop/claim-a does not fit; 50 % is left"):
        rig.prepare("a", rig.device(cores=60))
    assert rig.outside() == {"cores": 50, "memory": GIB}
    assert rig.files() == (set(), set())


def test_the_same_claim_again_is_the_same_answer(rig):
    names = [rig.prepare("a", rig.device(cores=60, share="s")) for _ in range(3)]

    assert names == [("a-s",)] * 3
    assert len(rig.listed()) == 1


def test_devices_of_one_card_are_counted_together(rig):
    with pytest.raises(RefusedError, match="60 % for claim shop/claim-a does not fit; 40 % is left"):
        rig.prepare("a", rig.device(cores=60, share="s"), rig.device(cores=60, share="t"))
    names = rig.prepare("a", rig.device(cores=60, share="s"), rig.device(cores=40, share="t"))
    web = rig.bind(rig.container(*names))

    assert rig.grant(web) == ("offline", 100, None)


def test_a_longer_list_of_consumers_is_taken_over(rig):
    (name,) = rig.prepare("a", rig.device())
    with pytest.raises(RefusedError, match="is not reserved for its Kubernetes pod"):
        rig.bind(rig.container(name, uid="pod-2"))
    rig.prepare("a", rig.device(), consumers=("pod-1", "pod-2"))

    assert rig.bind(rig.container(name, uid="pod-2"))
    assert rig.listed()["a"]["consumers"] == ["pod-1", "pod-2"]


def test_a_pod_that_joins_a_claim_starts_although_it_is_early(rig, monkeypatch):
    monkeypatch.setattr(claim_requests, "JOINING_S", 60)
    (name,) = rig.prepare("a", rig.device(cores=60))
    with ThreadPoolExecutor() as pool:
        early = pool.submit(rig.bind, rig.container(name, uid="pod-2", names=("shop", "cart", "model")))
        assert not wait_for([early], 0.2).done, "it waits"
        (other,) = rig.prepare("b", rig.device(1))
        assert rig.bind(rig.container(other)), "and nobody else does"
        assert not early.done()
        rig.prepare("a", rig.device(cores=60), consumers=("pod-1", "pod-2"))

        assert early.result() == "shop.cart.model"


def test_only_a_claim_that_is_there_is_waited_for(rig, monkeypatch):
    monkeypatch.setattr(claim_requests, "JOINING_S", 3600)

    with pytest.raises(RefusedError, match="there is no prepared device a-gpu"):
        rig.bind(rig.container("a-gpu"))
    with pytest.raises(RefusedError, match="is not reserved"):
        rig.bind(rig.container(*rig.prepare("a", rig.device()), uid=""))


def test_unused_claim_is_replaced_by_what_it_asks_for_now(rig):
    rig.prepare("a", rig.device(cores=60))
    rig.prepare("a", rig.device(card=1, cores=80, share="s"))

    assert [(each["cores"], each["share"]) for each in rig.listed()["a"]["devices"]] == [(80, "s")]
    assert [device["name"] for device in rig.specification("a")["devices"]] == ["a-s"]


def test_a_used_claim_is_not_replaced(rig):
    (name,) = rig.prepare("a", rig.device(cores=60))
    web = rig.bind(rig.container(name))

    with pytest.raises(RefusedError, match=f"pod {web} still uses it, so it is not prepared anew"):
        rig.prepare("a", rig.device(cores=50))
    assert rig.listed()["a"]["devices"][0]["cores"] == 60


def test_a_claim_is_dropped_once_its_container_has_ended(rig):
    (name,) = rig.prepare("a", rig.device(cores=60))
    web = rig.container(name)
    pod = rig.bind(web)
    with pytest.raises(RefusedError, match=f"claim shop/claim-a: pod {pod} still uses it, so it stays prepared"):
        rig.ask("grant.drop", uid="a")
    web.end()
    for _ in range(2):
        assert rig.ask("grant.drop", uid="a") == {}

    assert rig.listed() == {}
    assert rig.files() == (set(), set())
    assert rig.pods() == {}


def test_a_claim_whose_containers_process_is_left_stays(rig):
    (name,) = rig.prepare("a", rig.device())
    web = rig.container(name)
    rig.bind(web)
    rig.restart()
    with pytest.raises(RefusedError, match="still uses it"):
        rig.ask("grant.drop", uid="a")
    assert rig.listed()["a"]["pods"] == ["shop.web.model"]
    web.die()

    assert rig.ask("grant.drop", uid="a") == {}


def test_a_container_gets_the_sum_of_its_claims_on_each_card(rig):
    a = rig.prepare("a", rig.device(cores=30, memory=4 * GIB, share="s"), rig.device(1, cores=10, share="t"))
    b = rig.prepare("b", rig.device(cores=20, memory=GIB))
    web = rig.bind(rig.container(*a, *b))

    assert rig.grant(web, 0) == ("offline", 50, 5 * GIB)
    assert rig.grant(web, 1) == ("offline", 10, None)
    assert rig.outside() == {"cores": 0, "memory": 0}
    with pytest.raises(RefusedError, match="51 % for claim shop/claim-c does not fit; 50 % is left"):
        rig.prepare("c", rig.device(cores=51))


def test_every_hook_of_a_container_binds_it_once(rig):
    names = rig.prepare("a", rig.device(cores=60, memory=GIB, share="s"), rig.device(cores=40, memory=GIB, share="t"))
    web = rig.container(*names)

    assert [rig.bind(web) for _ in range(3)] == ["shop.web.model"] * 3
    assert rig.grant("shop.web.model") == ("offline", 100, 2 * GIB)
    rig.restart()
    assert rig.bind(web) == "shop.web.model"
    assert len(rig.pods()) == 1


def test_containers_of_one_claim_divide_it(rig):
    (name,) = rig.prepare("a", rig.device(cores=60, memory=8 * GIB), consumers=("pod-1", "pod-2"))
    first, second = rig.container(name), rig.container(name, names=("shop", "cart", "model"), uid="pod-2")
    one, two = rig.bind(first), rig.bind(second)

    assert (rig.grant(one), rig.grant(two)) == (("offline", 30, 4 * GIB),) * 2
    assert rig.listed()["a"]["pods"] == [one, two]
    first.end()
    rig.requests.reap()
    assert rig.grant(two) == ("offline", 60, 8 * GIB)


def test_a_second_container_gets_what_the_first_has_left(rig):
    (name,) = rig.prepare("a", rig.device(memory=8 * GIB))
    one = rig.bind(rig.container(name))
    assert rig.host.allocate(one, 0, 6 * GIB)
    two = rig.bind(rig.container(name, names=("shop", "web", "sidecar")))

    assert (rig.grant(one)[2], rig.grant(two)[2]) == (6 * GIB, 2 * GIB)
    assert not rig.host.allocate(one, 0, 1)
    rig.host.had[one, 0] = GIB
    rig.requests.reap()
    assert (rig.grant(one)[2], rig.grant(two)[2]) == (4 * GIB, 4 * GIB)


def test_who_takes_memory_meanwhile_takes_it_from_the_next(rig):
    (name,) = rig.prepare("a", rig.device(memory=30 * GIB))
    one, two = (rig.bind(rig.container(name, names=("shop", "web", each))) for each in ("one", "two"))
    rig.host.greedy = one
    three = rig.bind(rig.container(name, names=("shop", "web", "three")))

    assert rig.host.had[one, 0] == 15 * GIB
    assert rig.grant(two)[2] + rig.grant(three)[2] == 15 * GIB
    assert rig.grant(three)[2] == 5 * GIB, "the second may still take what it was left a moment ago"
    rig.requests.reap()
    assert rig.grant(two)[2] == rig.grant(three)[2] == 15 * GIB // 2


def test_a_second_container_is_refused_where_nothing_is_left(rig):
    (name,) = rig.prepare("a", rig.device(memory=8 * GIB))
    one = rig.bind(rig.container(name))
    assert rig.host.allocate(one, 0, 8 * GIB)
    with pytest.raises(RefusedError, match="nothing is left of the memory of the claim"):
        rig.bind(rig.container(name, names=("shop", "web", "sidecar")))

    assert rig.grant(one)[2] == 8 * GIB
    assert list(rig.pods()) == [one]


def test_a_refused_container_leaves_the_others_what_they_had(rig):
    (name,) = rig.prepare("a", rig.device(cores=60, memory=8 * GIB))
    one = rig.bind(rig.container(name))
    two = rig.container(name, names=("shop", "web", "sidecar"))
    rig.host.greedy = one  # it takes the rest before its limit is lowered
    with pytest.raises(RefusedError, match="nothing is left of the memory of the claim"):
        rig.bind(two)

    assert rig.grant(one) == ("offline", 60, 8 * GIB)
    assert list(rig.pods()) == [one]


def test_memory_left_behind_is_not_given_again(rig):
    names = [*rig.prepare("a", rig.device(memory=8 * GIB)), *rig.prepare("b", rig.device(memory=MEMORY - 8 * GIB))]
    rig.host.left = {0: 3 * GIB}  # an ended pod's memory, which another process has imported
    web = rig.bind(rig.container(names[0]))
    assert rig.outside() == {"cores": 0, "memory": 3 * GIB}
    assert rig.grant(web)[2] == 5 * GIB
    rig.host.left = {}
    rig.requests.reap()

    assert rig.grant(web)[2] == 8 * GIB


@pytest.fixture
def impatient(monkeypatch):
    """Have what was left a moment ago waited for no longer than a moment."""
    monkeypatch.setattr(pods, "_LEFT_S", 0.0)


def other(rig, *devices, **more):
    """Make a container of another namespace."""
    return rig.container(*devices, names=("bank", "b", "b"), uid="pod-2", **more)


def others_claim(rig, uid, **limits):
    """Prepare a claim of another namespace, and return the name of its device."""
    return rig.prepare(uid, rig.device(**limits), consumers=("pod-2",), namespace="bank")[0]


def leave(rig, *devices, size, **more):
    """Have a container end whose memory another process keeps; return its pod's name."""
    container = rig.container(*devices, **more)
    name = rig.bind(container)
    assert rig.host.allocate(name, 0, size)
    rig.host.keeps = True
    container.end()
    rig.requests.reap()
    rig.host.keeps = False
    return name


def test_memory_that_a_namespace_left_is_missing_to_it_alone(rig, impatient):
    """Nothing is missing to the claims of others, who cannot end the process that keeps it."""
    (mine,) = rig.prepare("a", rig.device(memory=8 * GIB))
    theirs = others_claim(rig, "b", memory=MEMORY - 8 * GIB)
    leave(rig, mine, size=3 * GIB)

    assert rig.outside()["memory"] == 0
    assert rig.grant(rig.bind(other(rig, theirs)))[2] == MEMORY - 8 * GIB
    assert rig.grant(rig.bind(rig.container(mine, names=("shop", "web", "again"))))[2] == 5 * GIB


def test_namespace_leaves_no_more_than_its_claims_hold(rig, impatient):
    """With one claim at a time, one container after the other would take all of the card."""
    (mine,) = rig.prepare("a1", rig.device(memory=8 * GIB))
    leave(rig, mine, size=8 * GIB, names=("shop", "web-1", "main"))
    rig.ask("grant.drop", uid="a1")
    (mine,) = rig.prepare("a2", rig.device(memory=8 * GIB))
    with pytest.raises(RefusedError, match="nothing is left of the memory of the claim"):
        leave(rig, mine, size=8 * GIB, names=("shop", "web-2", "main"))

    theirs = others_claim(rig, "b", memory=MEMORY - 8 * GIB)
    assert rig.grant(rig.bind(other(rig, theirs)))[2] == MEMORY - 8 * GIB


def test_two_claims_of_a_namespace_pay_once_for_what_it_left(rig, impatient):
    (mine,) = rig.prepare("a", rig.device(memory=4 * GIB))
    (more,) = rig.prepare("c", rig.device(memory=6 * GIB))
    leave(rig, mine, size=3 * GIB)

    assert rig.grant(rig.bind(rig.container(more, names=("shop", "web", "more"))))[2] == 6 * GIB
    assert rig.grant(rig.bind(rig.container(mine, names=("shop", "web", "again"))))[2] == 1 * GIB


def test_memory_left_without_a_claim_is_missing_to_all(rig, impatient):
    (mine,) = rig.prepare("a", rig.device(memory=8 * GIB))
    leave(rig, mine, size=3 * GIB)
    rig.ask("grant.drop", uid="a")

    assert rig.outside()["memory"] == 3 * GIB
    with pytest.raises(RefusedError, match="does not fit"):
        others_claim(rig, "b", memory=MEMORY - 2 * GIB)
    others_claim(rig, "b", memory=MEMORY - 3 * GIB)


def test_device_plugins_units_belong_to_whose_container_has_them(rig, impatient):
    """The plugin does not know the namespace when it prepares them."""
    mine, theirs = (
        rig.prepare(uid, rig.device(memory=MEMORY // 2), consumers=("*",), namespace="device-plugin")[0]
        for uid in ("a", "b")
    )
    leave(rig, mine, size=3 * GIB)

    assert rig.grant(rig.bind(rig.container(mine, names=("shop", "web", "again"))))[2] == MEMORY // 2 - 3 * GIB
    assert rig.grant(rig.bind(other(rig, theirs)))[2] == MEMORY // 2


def test_kept_memory_that_goes_is_given_again(rig, impatient):
    (mine,) = rig.prepare("a", rig.device(memory=MEMORY))
    left = leave(rig, mine, size=3 * GIB)
    again = rig.bind(rig.container(mine, names=("shop", "web", "again")))
    assert rig.grant(again)[2] == MEMORY - 3 * GIB
    del rig.host.kept[left]
    rig.requests.reap()

    assert rig.grant(again)[2] == MEMORY


def test_memory_that_goes_with_the_last_run_is_waited_for(rig, monkeypatch):
    """A restarted container gets all of its claim from its first call on."""
    (mine,) = rig.prepare("a", rig.device(memory=8 * GIB))
    last, looks = rig.container(mine), iter(range(5))
    rig.host.allocate(rig.bind(last), 0, 8 * GIB)
    rig.host.keeps = True
    last.end()  # and the daemon has not noticed yet

    def names():
        if rig.host.kept and next(looks, None) is None:
            rig.host.kept.clear()
        return list(rig.host.kept)

    monkeypatch.setattr(rig.host, "names_in_use", names)
    monkeypatch.setattr(pods, "_LEFT_S", 60.0)

    assert rig.grant(rig.bind(rig.container(mine)))[2] == 8 * GIB


def test_what_is_kept_in_part_counts_in_part(rig, impatient):
    (mine,) = rig.prepare("a", rig.device(memory=8 * GIB))
    left = leave(rig, mine, size=8 * GIB)
    rig.host.kept[left] = {0: 1 * GIB}

    assert rig.grant(rig.bind(rig.container(mine, names=("shop", "web", "again"))))[2] == 7 * GIB


def test_a_claim_of_a_few_bytes_is_a_claim(rig):
    (name,) = rig.prepare("a", rig.device(memory=4096))

    assert rig.grant(rig.bind(rig.container(name)))[2] == 4096


def test_a_quota_that_cannot_be_divided_refuses_the_second(rig):
    (name,) = rig.prepare("a", rig.device(cores=1))
    one = rig.bind(rig.container(name))
    with pytest.raises(RefusedError, match="cannot be divided among 2 containers"):
        rig.bind(rig.container(name, names=("shop", "web", "sidecar")))

    assert rig.grant(one)[1] == 1


def test_a_restarted_container_gets_all_of_its_claim(rig):
    (name,) = rig.prepare("a", rig.device(cores=60, memory=8 * GIB))
    last = rig.container(name)
    rig.bind(last)
    last.die()  # its cgroup is there, without a process
    assert rig.bind(rig.container(name)) == "shop.web.model"

    assert rig.grant("shop.web.model") == ("offline", 60, 8 * GIB)


def test_a_last_run_that_has_not_ended_leaves_the_rest(rig):
    (name,) = rig.prepare("a", rig.device(cores=60, memory=8 * GIB))
    last = rig.container(name)
    one = rig.bind(last)
    assert rig.host.allocate(one, 0, 3 * GIB)
    new = rig.container(name)
    two = rig.bind(new)

    assert two == new.id[:12]
    assert (rig.grant(one), rig.grant(two)) == (("offline", 1, 3 * GIB), ("offline", 59, 5 * GIB))
    last.end()
    rig.requests.reap()
    assert rig.grant(two) == ("offline", 60, 8 * GIB)


def test_a_pod_of_a_claim_is_changed_by_the_claim_alone(rig):
    (name,) = rig.prepare("a", rig.device(cores=60))
    web = rig.bind(rig.container(name))

    for change in ({"cores": 90}, {"cores": 10}, {"memory": GIB}, {"class": "online"}):
        with pytest.raises(RefusedError, match="its limits are those of its claim"):
            rig.ask("pod.set", name=web, **change)
    assert rig.grant(web) == ("offline", 60, None)


def test_a_policy_that_would_starve_a_claim_is_refused(rig):
    rig.prepare("a", rig.device())

    with pytest.raises(RefusedError, match="offline claim shop/claim-a has none"):
        rig.ask("gpu.set", gpu=0, policy="fixed-share")
    rig.ask("gpu.set", gpu=1, policy="fixed-share")
    with pytest.raises(RefusedError, match="offline claim shop/claim-b has none"):
        rig.prepare("b", rig.device(1))
    rig.prepare("b", rig.device(1, cores=5))


def test_a_policy_of_the_configuration_starves_no_container(rig):
    (name,) = rig.prepare("a", rig.device())
    rig.restart(Config(defaults=GpuSettings(policy="fixed-share")))

    with pytest.raises(RefusedError, match="fixed-share gives nothing to a pod without a quota"):
        rig.bind(rig.container(name))
    assert rig.pods() == {}


def test_a_container_in_its_last_runs_cgroup_replaces_it(rig):
    (name,) = rig.prepare("a", rig.device(cores=60))
    web = rig.container(name)
    rig.bind(web)
    web.id = "another"
    rig.bind(web)

    assert {pod["cgroup"] for pod in rig.pods().values()} == {web.at}
    assert rig.grant("shop.web.model") == ("offline", 60, None)


def test_a_container_with_a_limit_makes_no_memory_beside_it(rig):
    (name,) = rig.prepare("a", rig.device(memory=GIB))
    web = rig.container(name)
    web.nodes = [(226, 128)]

    with pytest.raises(RefusedError, match="/dev/dri makes video memory that no limit covers"):
        rig.bind(web)


def test_online_claims_leave_the_offline_floor(rig):
    rig.ask("gpu.set", gpu=0, offline_floor=20)
    with pytest.raises(RefusedError, match="an offline floor of 20 % do not fit"):
        rig.prepare("a", rig.device(cores=90, **{"class": "online"}))
    rig.prepare("a", rig.device(cores=80, **{"class": "online"}))

    with pytest.raises(RefusedError, match="do not fit"):
        rig.ask("gpu.set", gpu=0, offline_floor=30)


def test_two_classes_on_one_card_start_no_container(rig):
    names = rig.prepare("a", rig.device(share="s"), rig.device(share="t", **{"class": "online"}))
    with pytest.raises(RefusedError, match="of different classes"):
        rig.bind(rig.container(*names))

    assert rig.grant(rig.bind(rig.container(names[1])))[0] == "online"


def test_a_container_reaches_no_card_but_its_claims(rig):
    (name,) = rig.prepare("a", rig.device())
    wide, narrow = rig.container(name), rig.container(name)
    wide.env.append("QGPU_GPU_1=x")
    narrow.env.clear()

    with pytest.raises(RefusedError, match="it reaches pGPU 1, of which no claim gives it a part"):
        rig.bind(wide)
    with pytest.raises(RefusedError, match="no pGPU"):
        rig.bind(narrow)
    assert rig.pods() == {}


def test_a_claim_without_memory_limit_is_what_its_pods_have(rig):
    (name,) = rig.prepare("a", rig.device(cores=10))
    inside = rig.bind(rig.container(name))
    rig.ask("pod.create", name="x", grants={"0": {}})
    rig.host.had = {(inside, 0): GIB, ("x", 0): 2 * GIB}

    assert rig.outside() == {"cores": 0, "memory": 2 * GIB}


def test_a_pod_says_what_kubernetes_calls_it(rig):
    (name,) = rig.prepare("a", rig.device(cores=60))
    web = rig.bind(rig.container(name))
    rig.ask("pod.create", name="x", grants={"0": {}})
    keys = ("namespace", "pod", "container", "claim")
    found = {pod["name"]: tuple(pod[key] for key in keys) for pod in rig.ask("pod.list")["pods"]}

    assert found == {web: ("shop", "web", "model", "claim-a"), "x": ("", "", "", "")}


def test_what_claims_hold_is_counted(rig):
    (name,) = rig.prepare("a", rig.device(1, cores=60, memory=GIB))
    web = rig.bind(rig.container(name))
    first, second = rig.requests.counters.view().gpus

    assert (first.cores_prepared, first.memory_prepared) == (0, 0)
    assert (second.cores_prepared, second.memory_prepared) == (60, GIB)
    (pod,) = second.pods
    assert (pod.pod, pod.labels) == (web, ContainerLabels("shop", "web", "model", "claim-a"))


def test_a_real_card_is_reached_by_its_node(rig, monkeypatch):
    names = rig.prepare("a", rig.device(0, share="s"), rig.device(1, share="t"))
    cards = rig.requests.pods.cards
    monkeypatch.setattr(rig.requests.pods, "cards", {n: replace(card, minor=4 - n) for n, card in cards.items()})
    web = rig.container(names[0])
    web.env = ["QGPU_GPU_1=x"]  # an image may say that, and it means nothing
    for nodes, says in (
        ([(195, 4), (195, 3)], "it reaches pGPU 1, of which no claim gives it a part"),
        ([(195, 3)], "it reaches pGPU 1, of which no claim"),
        ([(195, 4), (195, 7)], "/dev/nvidia7 is not shared by qgpu"),
        ([(195, 255)], "no pGPU"),
    ):
        web.nodes = nodes
        with pytest.raises(RefusedError, match=says):
            rig.bind(web)
    web.nodes = [(195, 4), (195, 255)]
    rig.bind(web)
    both = rig.container(*names, names=("shop", "web", "both"))
    both.nodes = [(195, 4)]

    with pytest.raises(RefusedError, match="a part of pGPU 1, but it does not reach that"):
        rig.bind(both)
    assert list(rig.pods()) == ["shop.web.model"]


def test_who_may_not_change_things_may_not_prepare(rig):
    rig.session.may_change = False
    with pytest.raises(PermissionDeniedError, match=r"permission denied; use sudo"):
        rig.prepare("a", rig.device())
    assert rig.listed() == {}


def test_a_container_that_is_gone_holds_nothing(rig):
    (name,) = rig.prepare("a", rig.device(cores=60))
    web = rig.container(name)
    rig.bind(web)
    web.end()

    assert not (cgroup.mount() / web.at.lstrip("/")).exists()
    assert rig.listed()["a"]["pods"] == []
    assert rig.outside() == {"cores": 0, "memory": 0}
