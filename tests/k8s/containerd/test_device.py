"""A container that containerd gives a qgpu device by its name is a pod before it starts, or does not start."""

from __future__ import annotations

import pytest

from tests.k8s.containerd.node import until


def test_container_with_a_device_is_a_pod_with_its_limits(node):
    said = node.runtime.run(
        node.runtime.sandbox("cart-1"), "model", "qgpu.io/gpu=0", annotations={"qgpu.io/cores": "40"}
    )

    assert said == ""
    (grant,) = node.pods()["shop.cart-1.model"]["grants"]
    assert (grant["gpu"], grant["cores"], grant["class"]) == (0, 40, "offline")


def test_annotations_of_a_pod_reach_its_containers(node):
    node.runtime.run(node.runtime.sandbox("cart-1", annotations={"qgpu.io/cores": "40"}), "model", "qgpu.io/gpu=0")

    (grant,) = node.pods()["shop.cart-1.model"]["grants"]
    assert grant["cores"] == 40


@pytest.mark.parametrize("name", ["qgpu.io/gpu=0", "qgpu.io/gpu=all"])
def test_a_device_names_the_cards_of_its_container(node, name):
    node.runtime.run(node.runtime.sandbox("cart-1"), "model", name)

    found = [grant["gpu"] for grant in node.pods()["shop.cart-1.model"]["grants"]]
    assert found == ([0] if name.endswith("0") else [0, 1])


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({"qgpu.io/cores": "101"}, "qgpu: cores 101: a quota is 1 to 100 per cent of a pGPU"),
        ({"qgpu.io/memory": "900GiB"}, "qgpu: pGPU 0: 900 GiB for pod shop.cart-1.model does not fit"),
        ({"qgpu.io/cpu": "4"}, "qgpu: annotation qgpu.io/cpu: there is no such limit"),
    ],
)
def test_refusal_is_the_interfaces_error_word_for_word(node, annotations, says):
    said = node.runtime.run(node.runtime.sandbox("cart-1"), "model", "qgpu.io/gpu=0", annotations=annotations)

    assert says in said
    assert node.pods() == {}


def test_without_a_qgpu_device_it_is_no_pod(node):
    assert node.runtime.run(node.runtime.sandbox("cart-1"), "model") == ""
    assert node.pods() == {}


def test_unknown_device_starts_no_container(node):
    said = node.runtime.run(node.runtime.sandbox("cart-1"), "model", "qgpu.io/gpu=7")

    assert "unresolvable CDI devices qgpu.io/gpu=7" in said


def test_a_pods_own_cdi_annotation_gives_it_nothing(node):
    sandbox = node.runtime.sandbox("cart-1", annotations={"cdi.k8s.io/mine": "qgpu.io/gpu=0"})

    assert node.runtime.run(sandbox, "model") == ""
    assert node.pods() == {}


def test_ended_sandbox_gives_the_grant_back(node):
    cart = node.runtime.sandbox("cart-1")
    node.runtime.run(cart, "model", "qgpu.io/gpu=0", annotations={"qgpu.io/cores": "100"})
    node.runtime.end(cart)
    until(lambda: not node.pods())

    full = {"qgpu.io/cores": "100"}
    assert node.runtime.run(node.runtime.sandbox("cart-2"), "model", "qgpu.io/gpu=0", annotations=full) == ""
