"""The manifests say what the driver understands: its options, parameters, capacities and attributes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import click
import pytest

pytest.importorskip("lightkube", reason="needs the extra k8s")
cel = pytest.importorskip("cel_expr_python.cel", reason="needs cel-expr-python")

from qgpu.k8s import main, quantities, resource_slices, resources  # noqa: E402  (these need the extra)
from qgpu.k8s.claims import CORES, MEMORY  # noqa: E402
from qgpu.k8s.names import DRIVER, KUBELET_DIR  # noqa: E402
from qgpu.k8s.parameters import Source, merge  # noqa: E402
from qgpu.k8s.qgpud import Card, Node  # noqa: E402
from qgpu.model import PodClass  # noqa: E402
from tests.deploy.tools import MANIFESTS, ROOT, parse  # noqa: E402

_GI = 1024**3
CARD = Card(
    0, "GPU-00000000-0000-0000-0000-000000000000", "NVIDIA H200", 141 * _GI, "fixed-share", "best-effort", "", 0, 0
)
NODE = Node("kmod", "580.105.08", (CARD,))


def objects(kind: str) -> Iterator[dict[str, Any]]:
    """Yield every object of a kind in the manifests."""
    for path in sorted(MANIFESTS.rglob("*.yaml")):
        yield from (each for each in parse(path.read_text()) if each["kind"] == kind)


def claims() -> Iterator[dict[str, Any]]:
    """Yield the devices of every claim in the examples."""
    for each in objects("ResourceClaimTemplate"):
        yield each["spec"]["spec"]["devices"]
    for each in objects("ResourceClaim"):
        yield each["spec"]["devices"]


def requests() -> Iterator[dict[str, Any]]:
    """Yield every request of the examples, and every alternative in one."""
    for devices in claims():
        for request in devices["requests"]:
            yield from request.get("firstAvailable") or [request["exactly"]]


def parameters(config: list[dict[str, Any]], source: Source) -> list[tuple[str, dict[str, Any]]]:
    """Return the parameters of configurations, each with its source."""
    assert {each["opaque"]["driver"] for each in config} <= {DRIVER}
    return [(source, each["opaque"]["parameters"]) for each in config]


def taken(words: list[str]) -> str:
    """Return the mode that the driver would run in; a wrong option raises click.UsageError."""
    context = main.command.make_context("qgpu-k8s", words)
    name, mode, rest = main.command.resolve_command(context, [*context._protected_args, *context.args])
    assert isinstance(mode, click.Command)
    mode.make_context(str(name), rest, context)
    return str(name)


def test_the_driver_takes_the_pods_arguments() -> None:
    (driver,) = objects("DaemonSet")
    (container,) = driver["spec"]["template"]["spec"]["containers"]

    assert taken(container["args"]) == "dra"
    assert taken(["device-plugin", *container["args"][1:]]) == "device-plugin"
    assert str(KUBELET_DIR) in " ".join(container["args"])


def test_the_driver_takes_the_services_arguments() -> None:
    (line,) = re.findall(r"^ExecStart=\S+/qgpu-k8s (.*)$", (ROOT / "deploy/systemd/qgpu-k8s.service").read_text(), re.M)

    assert taken(shlex.split(line)) == "dra"


def test_each_class_gives_the_class_of_pods_that_it_names() -> None:
    given = {
        each["metadata"]["name"]: merge(parameters(each["spec"]["config"], Source.CLASS)).pod_class
        for each in objects("DeviceClass")
    }

    assert given == {"qgpu": PodClass.OFFLINE, "qgpu-online": PodClass.ONLINE}


def test_the_parameters_of_examples_are_understood() -> None:
    of_class = {
        each["metadata"]["name"]: parameters(each["spec"]["config"], Source.CLASS) for each in objects("DeviceClass")
    }
    for devices in claims():
        (request,) = devices["requests"]
        for name in {each["deviceClassName"] for each in request.get("firstAvailable") or [request["exactly"]]}:
            merge([*of_class[name], *parameters(devices.get("config", []), Source.CLAIM)])


def test_examples_ask_for_capacities_that_cards_have() -> None:
    assert {name for each in requests() for name in each["capacity"]["requests"]} <= {MEMORY, CORES}


def test_the_resources_of_examples_are_served() -> None:
    served = {each.name for each in resources.served((), 1)}
    shared = {
        each["spec"]["extendedResourceName"]
        for each in objects("DeviceClass")
        if "extendedResourceName" in each["spec"]
    }
    asked = {
        key
        for pod in objects("Pod")
        for container in pod["spec"]["containers"]
        for key in container["resources"].get("limits", {})
    }

    assert asked == {f"{DRIVER}/cores", *shared}
    assert asked - shared <= served
    assert not served & shared


def device() -> dict[str, Any]:
    """Return a card as selectors see it. Quantities are numbers here, and versions lists of them."""
    sharing = resource_slices.SharingOptions(_GI // 2, _GI // 4, _GI, 64)
    (made,) = resource_slices.spec(NODE, "n", sharing, resource_slices.Condition(), 1).to_dict()["devices"]
    attributes = {name: next(iter(value.values())) for name, value in made["attributes"].items()}
    attributes["driverVersion"] = [int(each) for each in attributes["driverVersion"].split(".")]
    capacity = {name: quantities.whole(value["value"]) for name, value in made["capacity"].items()}
    return {"driver": DRIVER, "attributes": {DRIVER: attributes}, "capacity": {DRIVER: capacity}}


def _functions() -> list[Any]:
    dyn, text = cel.Type.DYN, cel.Type.STRING
    read = {
        "semver": lambda version: [int(each) for each in version.split(".")],
        "quantity": quantities.whole,
    }
    made = [
        cel.FunctionDecl(name, [cel.Overload(f"{name}_text", dyn, [text], False, impl)]) for name, impl in read.items()
    ]
    compare = {
        "isGreaterThan": (cel.Type.BOOL, lambda one, other: one > other),
        "compareTo": (cel.Type.INT, lambda one, other: (one > other) - (one < other)),
    }
    made += [
        cel.FunctionDecl(name, [cel.Overload(f"{name}_dyn", kind, [dyn, dyn], True, impl)])
        for name, (kind, impl) in compare.items()
    ]
    return made


def test_selectors_choose_by_attributes_that_cards_have() -> None:
    environment = cel.NewEnv(
        variables={"device": cel.Type.DYN}, extensions=[cel.CelExtension("kubernetes", _functions())]
    )
    selectors = [
        selector["cel"]["expression"]
        for each in (*(each["spec"] for each in objects("DeviceClass")), *requests())
        for selector in each.get("selectors", ())
    ]

    assert len(selectors) >= 4
    for expression in selectors:
        assert environment.compile(expression).eval(data={"device": device()}).plain_value() is True, expression


def test_constraints_name_attributes_that_cards_have() -> None:
    named = {
        value
        for devices in claims()
        for constraint in devices.get("constraints", ())
        for key, value in constraint.items()
        if key.endswith("Attribute")
    }

    assert named
    assert {name.removeprefix(f"{DRIVER}/") for name in named} <= device()["attributes"][DRIVER].keys()
