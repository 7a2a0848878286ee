"""What claims ask of a node, and what of that is refused."""

from __future__ import annotations

from typing import Any

import pytest
from lightkube.resources.resource_v1 import ResourceClaim

from qgpu.errors import InvalidValueError, QgpuError, RefusedError
from qgpu.ipc import codec
from qgpu.k8s import claims
from qgpu.k8s.qgpud import Card
from qgpu.model.member_limits import MemberLimits
from qgpu.model.prepared_grant import PreparedGrant
from tests.k8s.world import GI, NODE, card, parameters, result

UID = "claim-uid"


def claim(
    *results: dict[str, Any], configurations: tuple[dict[str, Any], ...] = (), uid: str = UID, **status: Any
) -> ResourceClaim:
    """A claim as the API server returns it."""
    reserved = [{"resource": "pods", "name": "p", "uid": "pod-uid"}]
    content = {
        "metadata": {"namespace": "team", "name": "model", "uid": uid},
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": list(results), "config": list(configurations)}},
            "reservedFor": reserved,
        }
        | status,
    }
    return ResourceClaim.from_dict(content)


def read(*results: dict[str, Any], configurations: tuple[dict[str, Any], ...] = ()) -> PreparedGrant:
    return claims.read(claim(*results, configurations=configurations), UID, NODE)


def test_limits_are_what_the_scheduler_consumed() -> None:
    (device,) = read(result(1, memory="1500M", cores="35", share="ab")).devices

    assert (device.gpu, device.share, device.grant.memory, device.grant.cores) == (card(1), "ab", 1_500_000_000, 35)


def test_no_cores_consumed_means_no_quota() -> None:
    assert read(result(0, cores="0")).devices[0].grant.cores is None


def test_two_shares_of_one_card_stay_two_devices() -> None:
    found = read(result(0, share="a", memory="2Gi"), result(0, share="b", memory="3Gi")).devices

    assert [(each.share, each.grant.memory) for each in found] == [("a", 2 * GI), ("b", 3 * GI)]


def test_devices_of_other_drivers_and_nodes_are_left_out() -> None:
    mine = result(0)

    assert len(read(mine, mine | {"driver": "gpu.nvidia.com"}, mine | {"pool": "node-2"}).devices) == 1


def test_class_and_latency_target_come_from_parameters() -> None:
    (device,) = read(
        result(0), configurations=(parameters("FromClass", **{"class": "online", "latencyTarget": "2ms"}),)
    ).devices

    assert (device.grant.pod_class, device.grant.latency_target_ns) == ("online", 2_000_000)


def test_sharing_mps_makes_a_group_with_its_members_part() -> None:
    asked = {"defaultActiveThreadPercentage": 25, "defaultPinnedDeviceMemoryLimit": "4Gi"}
    found = read(result(0), configurations=(parameters("FromClaim", sharing="MPS", **asked),))

    assert (found.group, found.part) == (f"claim-{UID}", MemberLimits(25, 4 * GI))


def test_without_sharing_there_is_no_group() -> None:
    assert read(result(0), configurations=(parameters("FromClaim", sharing="TimeSlicing"),)).group == ""


@pytest.mark.parametrize(
    ("results", "asked", "why"),
    [
        (2, {"sharing": "MPS"}, "a group has one device, not 2"),
        (1, {"sharing": "Spatial"}, "'Spatial': choose one of TimeSlicing, MPS"),
        (1, {"sharing": "MPS", "defaultActiveThreadPercentage": "0"}, "give 1 to 100"),
        (1, {"sharing": "MPS", "defaultActiveThreadPercentage": 101}, "give 1 to 100"),
        (1, {"sharing": "MPS", "defaultActiveThreadPercentage": True}, "write text"),
        (1, {"sharing": "MPS", "defaultPinnedDeviceMemoryLimit": "1Ki"}, "give 1 MiB or more"),
        (1, {"sharing": "MPS", "defaultPinnedDeviceMemoryLimit": "much"}, "is not a quantity"),
        (1, {"defaultActiveThreadPercentage": "50"}, "only sharing MPS has it"),
    ],
)
def test_group_that_cannot_be_is_refused(results: int, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidValueError, match=why):
        read(*[result(0, share=str(n)) for n in range(results)], configurations=(parameters("FromClaim", **asked),))


def test_claim_overrides_the_latency_target_of_its_class() -> None:
    (device,) = read(
        result(0),
        configurations=(
            parameters("FromClaim", latencyTarget="5ms"),
            parameters("FromClass", **{"class": "online", "latencyTarget": "2ms"}),
        ),
    ).devices

    assert device.grant.latency_target_ns == 5_000_000


def test_claim_may_lower_its_class_which_drops_the_target() -> None:
    (device,) = read(
        result(0),
        configurations=(
            parameters("FromClass", **{"class": "online", "latencyTarget": "2ms"}),
            parameters("FromClaim", **{"class": "offline"}),
        ),
    ).devices

    assert (device.grant.pod_class, device.grant.latency_target_ns) == ("offline", None)


def test_parameters_apply_to_the_requests_that_they_name() -> None:
    online = parameters("FromClass", "fast", **{"class": "online"})
    found = read(result(0, request="fast/first"), result(1, request="slow"), configurations=(online,)).devices

    assert [each.grant.pod_class for each in found] == ["online", "offline"]


def test_parameters_of_other_drivers_are_left_out() -> None:
    other = parameters("FromClaim", sharing="mps")
    other["opaque"]["driver"] = "gpu.nvidia.com"

    assert read(result(0), configurations=(other,)).devices[0].grant.pod_class == "offline"


@pytest.mark.parametrize(
    ("configuration", "says"),
    [
        (parameters("FromClaim", **{"class": "online"}), "class online may not be asked for by a claim"),
        (parameters("FromClaim", cores=99), "unknown key cores"),
        (parameters("FromClaim", **{"class": "best"}), "choose one of online, offline"),
        (parameters("FromClaim", **{"class": 3}), "class 3: write text"),
        (parameters("FromClaim", latencyTarget="2ms"), "only class online has one"),
        (parameters("FromClass", latencyTarget="soon"), "not a time such as"),
        (parameters("FromClaim", policy="fair"), "choose one of best-effort, fixed-share, burst-share"),
        (parameters("FromClaim", kind="GpuConfig"), "write qgpu.io/v1 and GrantParameters"),
        (parameters("FromClaim", apiVersion="qgpu.io/v2"), "write qgpu.io/v1 and GrantParameters"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(configuration: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValueError, match=says) as refusal:
        read(result(0), configurations=(configuration,))

    assert str(refusal.value).startswith("claim team/model: request gpu: ")
    assert "\n" not in str(refusal.value)


def test_claim_may_not_name_another_policy_than_its_class() -> None:
    both = parameters("FromClass", policy="fixed-share"), parameters("FromClaim", policy="burst-share")

    with pytest.raises(InvalidValueError, match="policy burst-share: other parameters of this request say fixed-share"):
        read(result(0), configurations=both)
    assert claims.policies(claim(result(0), configurations=both[:1]), NODE)[0].policy == "fixed-share"


CARD = Card(0, card(0), "card", GI, "fixed-share", "best-effort", "", 0, 0)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"policy": "fixed-share"}, ""),
        ({"policy": "burst-share"}, "has policy fixed-share, and the claim asks for burst-share; select cards by"),
        ({"class": "online", "policy": "best-effort"}, ""),
        ({"class": "online", "policy": "fixed-share"}, "onlinePolicy best-effort, and the claim asks for fixed-share"),
        ({}, ""),
    ],
)
def test_card_must_have_the_policy_for_the_claims_class(values: dict[str, str], why: str) -> None:
    asked = claims.policies(claim(result(0), configurations=(parameters("FromClass", **values),)), NODE)
    try:
        claims.check_policies("claim team/model", asked, [CARD])
        said = ""
    except RefusedError as error:
        said = str(error)

    assert why in said
    assert bool(why) == bool(said)
    assert "\n" not in said


def test_policy_is_asked_of_the_cards_of_its_request() -> None:
    asked = claims.policies(
        claim(
            result(0, request="fixed/a"),
            result(1, request="any"),
            configurations=(parameters("FromClaim", "fixed", policy="fixed-share"),),
        ),
        NODE,
    )

    assert [(each.request, each.gpu) for each in asked] == [("fixed/a", card(0))]


def without(key: str) -> dict[str, Any]:
    """An allocation in which a part is missing."""
    found = result(0)
    del found[key]
    return found


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (without("consumedCapacity"), "the scheduler that chose the card, need feature gate DRAConsumableCapacity"),
        (result(0) | {"consumedCapacity": {"cores": "5"}}, "DRAConsumableCapacity"),
        (result(0, memory="lots"), "not a quantity"),
        (result(0, memory="1500m"), "not a whole number"),
        (result(0, cores="-3"), "not a whole number"),
        (result(0) | {"device": "gpu-0"}, "none of qgpu's"),
        (result(0) | {"adminAccess": True}, "no admin access"),
    ],
)
def test_unusable_allocation_is_refused_in_one_line(found: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValueError, match=says):
        read(found)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (claim(result(0), uid="another"), "replaced by another"),
        (claim(), "no device of qgpu.io on node"),
        (claim(result(0), allocation=None), "no device of qgpu.io on node"),
        (
            claim(
                result(0),
                reservedFor=[{"resource": "podgroups", "apiGroup": "scheduling.k8s.io", "name": "g", "uid": "u"}],
            ),
            "reserved for podgroups g",
        ),
    ],
)
def test_claim_that_is_not_this_nodes_is_refused(given: ResourceClaim, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        claims.read(given, UID, NODE)


def test_claim_made_for_a_pod_is_not_shared() -> None:
    content = claim(result(0)).to_dict()
    content["metadata"]["ownerReferences"] = [
        {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "pod-uid", "controller": True}
    ]

    assert claims.may_be_shared(claim(result(0)))
    assert not claims.may_be_shared(ResourceClaim.from_dict(content))


def test_message_has_the_keys_that_qgpud_reads() -> None:
    message = codec.prepared_to_json(read(result(0, share="s", cores="7")))

    assert message.keys() == {"uid", "namespace", "name", "consumers", "devices", "part"}
    assert message["part"] is None
    assert message["consumers"] == ["pod-uid"]
    assert message["devices"] == [
        {
            "request": "gpu",
            "gpu": card(0),
            "share": "s",
            "class": "offline",
            "cores": 7,
            "memory": GI,
            "latency_target_ns": None,
            "profiling": False,
            "graphics": False,
        }
    ]


def test_every_refusal_is_an_error_of_ours() -> None:
    with pytest.raises(QgpuError):
        claims.read(ResourceClaim.from_dict({"metadata": {"name": "x"}, "spec": {}}), UID, NODE)


@pytest.mark.parametrize(("named", "refused"), [(False, True), (True, False)])
def test_parameters_of_several_classes_need_requests_named(*, named: bool, refused: bool) -> None:
    """kube-scheduler 1.34.0 and 1.34.1 name none; then the last class's parameters would count for all."""
    requests = [
        {"name": "bulk", "exactly": {"deviceClassName": "qgpu"}},
        {"name": "fast", "firstAvailable": [{"name": "first", "deviceClassName": "qgpu-online"}]},
    ]
    configurations = [parameters("FromClass", **{"class": name}) for name in ("offline", "online")]
    for each, name in zip(configurations, ("bulk", "fast"), strict=True):
        each["requests"] = [name] if named else None
    asked = claim(
        result(0, request="bulk", cores="20"),
        result(1, request="fast/first", cores="20"),
        configurations=tuple(configurations),
    ).to_dict() | {"spec": {"devices": {"requests": requests}}}
    if refused:
        with pytest.raises(InvalidValueError, match="update the scheduler"):
            claims.read(ResourceClaim.from_dict(asked), UID, NODE)
        return
    found = claims.read(ResourceClaim.from_dict(asked), UID, NODE)

    assert [str(device.grant.pod_class) for device in found.devices] == ["offline", "online"]
