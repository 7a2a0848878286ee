"""What the admission policies let through: their CEL, evaluated on requests as the API server shows them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.tools import MANIFESTS, parse

cel = pytest.importorskip("cel_expr_python.cel", reason="needs cel-expr-python")
optional = pytest.importorskip("cel_expr_python.ext.ext_optional")

_NAMES = ("object", "oldObject", "request", "namespaceObject", "variables")
ENVIRONMENT = cel.NewEnv(variables=dict.fromkeys(_NAMES, cel.Type.DYN), extensions=[optional.ExtOptional()])
POLICIES = {
    each["metadata"]["name"]: each["spec"]
    for name in ("admission.yaml", "pods/pods.yaml", "examples/offline-memory-only.yaml")
    for each in parse((MANIFESTS / name).read_text())
    if each["kind"] == "ValidatingAdmissionPolicy"
}
ALLOWED = {"metadata": {"name": "team", "labels": {"qgpu.io/online": "allowed", "qgpu.io/mps": "allowed"}}}
PARAMETERS = {"apiVersion": "qgpu.io/v1", "kind": "GrantParameters"}
DRIVER = "system:serviceaccount:qgpu-system:qgpu-k8s"


def evaluate(expression: str, data: dict[str, Any]) -> Any:
    """Return what an expression comes to."""
    return ENVIRONMENT.compile(expression).eval(data=data).plain_value()


def refusals(policy: str, **data: Any) -> list[str]:
    """Return why a policy refuses a request; nothing if it lets it through."""
    spec = POLICIES[policy]
    data = {"oldObject": None, "request": {}, "namespaceObject": {"metadata": {"name": "team"}}} | data
    data["variables"] = variables = {}
    if not all(evaluate(each["expression"], data) for each in spec.get("matchConditions", ())):
        return []
    for each in spec["variables"]:
        variables[each["name"]] = evaluate(each["expression"], data)
    return [
        each["message"] if "message" in each else evaluate(each["messageExpression"], data)
        for each in spec["validations"]
        if not evaluate(each["expression"], data)
    ]


def devices(class_name: str = "qgpu", **parameters: Any) -> dict[str, Any]:
    """Return the devices of a claim, with a configuration if there are parameters."""
    made: dict[str, Any] = {"requests": [{"name": "gpu", "exactly": {"deviceClassName": class_name}}]}
    if parameters:
        made["config"] = [{"opaque": {"driver": "qgpu.io", "parameters": parameters}}]
    return made


def claim(asked: dict[str, Any], **data: Any) -> list[str]:
    """Return why a claim is refused."""
    return refusals(
        "claims.qgpu.io",
        object={"spec": {"devices": asked}},
        request={"resource": {"resource": "resourceclaims"}},
        **data,
    )


@pytest.mark.parametrize(
    "asked",
    [
        devices(),
        devices(**PARAMETERS),
        devices(**PARAMETERS, latencyTarget="2ms"),
        devices(**PARAMETERS, policy="fixed-share"),
        devices(**PARAMETERS, **{"class": "offline"}),
        devices(**PARAMETERS, sharing="TimeSlicing"),
        {"requests": [{"name": "a", "firstAvailable": [{"name": "b", "deviceClassName": "qgpu"}]}]},
        {"config": [{"opaque": {"driver": "other.example", "parameters": {"class": "online"}}}]},
        {},
    ],
)
def test_a_claim_within_its_class_is_let_through(asked: dict[str, Any]) -> None:
    assert claim(asked) == []


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (devices(**PARAMETERS, **{"class": "online"}), "may not ask for class online"),
        (devices(**PARAMETERS, **{"class": "ONLINE"}), "may not ask for class online"),
        (devices(**PARAMETERS, cores=50), "only apiVersion, kind, class, latencyTarget, policy, sharing, default"),
        (devices(**PARAMETERS, policy="1"), "choose one of best-effort, burst-share, fixed-share"),
        (devices(**PARAMETERS, sharing="MPS"), "label qgpu.io/mps=allowed"),
        (devices(**PARAMETERS, sharing="other"), "label qgpu.io/mps=allowed"),
        (devices(**{"class": "offline"}), "write apiVersion: qgpu.io/v1"),
        (devices(**PARAMETERS | {"kind": "Other"}), "write apiVersion: qgpu.io/v1"),
        (devices("qgpu-online"), "label qgpu.io/online=allowed"),
        (
            {"requests": [{"name": "a", "firstAvailable": [{"name": "b", "deviceClassName": "qgpu-online"}]}]},
            "label qgpu.io/online=allowed",
        ),
    ],
)
def test_a_claim_beyond_its_class_is_refused(asked: dict[str, Any], why: str) -> None:
    (refusal,) = claim(asked)

    assert why in refusal


def test_class_online_needs_the_namespaces_label() -> None:
    assert claim(devices("qgpu-online", **PARAMETERS, latencyTarget="2ms"), namespaceObject=ALLOWED) == []


def test_sharing_mps_needs_the_namespaces_label() -> None:
    asked = devices(**PARAMETERS, sharing="MPS", defaultActiveThreadPercentage=50, defaultPinnedDeviceMemoryLimit="4Gi")

    assert claim(asked, namespaceObject=ALLOWED) == []


def test_a_template_is_judged_like_its_claims() -> None:
    template = {"spec": {"spec": {"devices": devices(**PARAMETERS, **{"class": "online"})}}}

    (why,) = refusals("claims.qgpu.io", object=template, request={"resource": {"resource": "resourceclaimtemplates"}})

    assert "may not ask for class online" in why


@pytest.mark.parametrize("path", sorted((MANIFESTS / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_let_through(path: Any) -> None:
    for each in parse(path.read_text()):
        if each["kind"] in ("ResourceClaim", "ResourceClaimTemplate"):
            request = {"resource": {"resource": f"{each['kind'].lower()}s"}}
            assert refusals("claims.qgpu.io", object=each, request=request, namespaceObject=ALLOWED) == []
        elif each["kind"] == "Pod":
            assert refusals("pods.qgpu.io", object=each) == []


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"exactly": {"deviceClassName": "qgpu", "capacity": {"requests": {"memory": "8Gi"}}}}, False),
        ({"exactly": {"deviceClassName": "qgpu"}}, False),
        ({"exactly": {"deviceClassName": "qgpu-online", "capacity": {"requests": {"cores": "60"}}}}, False),
        ({"exactly": {"deviceClassName": "qgpu", "capacity": {"requests": {"cores": "1", "memory": "8Gi"}}}}, True),
        (
            {
                "firstAvailable": [
                    {"name": "a", "deviceClassName": "qgpu"},
                    {"name": "b", "deviceClassName": "qgpu", "capacity": {"requests": {"cores": "30"}}},
                ]
            },
            True,
        ),
    ],
)
@pytest.mark.parametrize("kind", ["resourceclaims", "resourceclaimtemplates"])
def test_example_policy_lets_offline_pods_take_memory_only(asked: dict[str, Any], refused: bool, kind: str) -> None:
    spec = {"devices": {"requests": [{"name": "gpu", **asked}]}}
    made = {"spec": {"spec": spec} if kind == "resourceclaimtemplates" else spec}
    found = refusals("offline-memory-only.example.com", object=made, request={"resource": {"resource": kind}})

    assert found == (["offline pods take memory only in this namespace: leave out cores"] if refused else [])


def test_claims_are_judged_only_when_they_are_created() -> None:
    """A claim that the policy would refuse today must still lose its finalizers, or it could never be deleted."""
    (rule,) = POLICIES["claims.qgpu.io"]["matchConstraints"]["resourceRules"]

    assert rule["operations"] == ["CREATE"]


def pod(**annotations: str) -> dict[str, Any]:
    """Return a pod with annotations, whose keys have / for __ and . for _."""
    named = {key.replace("__", "/").replace("_", "."): value for key, value in annotations.items()}
    metadata = {"name": "x"} | ({"annotations": named} if named else {})
    return {"metadata": metadata, "spec": {"containers": [{"name": "x"}]}}


@pytest.mark.parametrize("made", [pod(), pod(example_com__cores="99"), pod(cdi_k8s_io__x="other.example/gpu=0")])
def test_a_pod_without_our_annotations_is_let_through(made: dict[str, Any]) -> None:
    assert refusals("pods.qgpu.io", object=made) == []


@pytest.mark.parametrize("made", [pod(qgpu_io__cores="99"), pod(cdi_k8s_io__x="qgpu.io/gpu=0")])
def test_a_pod_with_annotations_for_the_hook_is_refused(made: dict[str, Any]) -> None:
    assert len(refusals("pods.qgpu.io", object=made)) == 1
    assert len(refusals("pods.qgpu.io", object=made, oldObject=pod())) == 1


def test_a_pod_that_had_such_annotations_can_still_change() -> None:
    """Otherwise its finalizers could not be removed."""
    made = pod(qgpu_io__cores="99")

    assert refusals("pods.qgpu.io", object=made, oldObject=made) == []
    assert len(refusals("pods.qgpu.io", object=pod(qgpu_io__cores="100"), oldObject=made)) == 1


@pytest.mark.parametrize("place", ["containers", "initContainers"])
@pytest.mark.parametrize("resource", ["qgpu.io/online-cores", "deviceclass.resource.kubernetes.io/qgpu-online"])
def test_a_pods_online_resource_needs_the_namespaces_label(place: str, resource: str) -> None:
    made = pod()
    made["spec"][place] = [{"name": "y", "resources": {"limits": {"cpu": "1", resource: "10"}}}]

    assert len(refusals("pods.qgpu.io", object=made)) == 1
    assert refusals("pods.qgpu.io", object=made, namespaceObject=ALLOWED) == []
    assert refusals("pods.qgpu.io", object=made, oldObject=made) == []


def slices(user: str, node: str, operation: str = "UPDATE", driver: str = "qgpu.io") -> list[str]:
    """Return why a change of node a's slice is refused, by a user whose token names a node."""
    extra = {"authentication.kubernetes.io/node-name": [node]} if node else {}
    changed = {"spec": {"nodeName": "a", "driver": driver}}
    return refusals(
        "slices.qgpu.io",
        object=None if operation == "DELETE" else changed,
        oldObject=None if operation == "CREATE" else changed,
        request={"operation": operation, "userInfo": {"username": user, "extra": extra}},
    )


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE", "DELETE"])
def test_the_driver_changes_only_slices_of_its_node(operation: str) -> None:
    assert slices(DRIVER, "a", operation) == []
    assert slices(DRIVER, "b", operation) == ["the driver on node b may only change slices of that node"]
    assert slices("system:node:b", "", operation) == []


def test_the_driver_changes_no_other_drivers_slices() -> None:
    assert slices(DRIVER, "a", driver="other.example") == ["the driver may only change slices of qgpu.io"]


def test_a_token_without_a_node_is_refused() -> None:
    assert "names no node" in slices(DRIVER, "")[0]
