"""What a container asks for: every name means what its makers say, and doubt is an error."""

from __future__ import annotations

import pytest

from qgpu.errors import InvalidValueError, RefusedError
from qgpu.model import ContainerPolicy, Grant, PodClass, RequestBounds
from qgpu.runtime import requested_limits
from qgpu.runtime.requested_limits import wanted

GIB = 1 << 30

SAID = {
    "qgpu.io/cores": ("40", Grant(cores=40)),
    "qgpu.io/memory": ("16GiB", Grant(memory=16 * GIB)),
    "qgpu.io/class": ("online", Grant(PodClass.ONLINE)),
    "tke.cloud.tencent.com/qgpu-core": ("40", Grant(cores=40)),
    "tke.cloud.tencent.com/qgpu-memory": ("16", Grant(memory=16 * GIB)),
    "tke.cloud.tencent.com/qgpu-core-greedy": ("40", Grant(PodClass.OFFLINE)),
    "tke.cloud.tencent.com/app-class": ("online", Grant(PodClass.ONLINE)),
    "nvidia.com/gpucores": ("40", Grant(cores=40)),
    "nvidia.com/gpumem": ("3000", Grant(memory=3000 << 20)),
    "nvidia.com/priority": ("0", Grant(PodClass.ONLINE)),
    "aliyun.com/gpu-core.percentage": ("40", Grant(cores=40)),
    "aliyun.com/gpu-mem": ("3", Grant(memory=3 * GIB)),
    "QGPU_CORES": ("40", Grant(cores=40)),
    "QGPU_MEMORY": ("512MiB", Grant(memory=512 << 20)),
    "QGPU_CLASS": ("online", Grant(PodClass.ONLINE)),
    "CUDA_DEVICE_SM_LIMIT": ("40", Grant(cores=40)),
    "CUDA_DEVICE_MEMORY_LIMIT": ("3000m", Grant(memory=3000 << 20)),
    "CUDA_DEVICE_MEMORY_LIMIT_0": ("3000m", Grant(memory=3000 << 20)),
    "CUDA_TASK_PRIORITY": ("1", Grant(PodClass.OFFLINE)),
    "ALIYUN_COM_GPU_MEM_CONTAINER": ("3", Grant(memory=3 * GIB)),
}
NO_LIMIT = {"nvidia.com/gpucores": "0", "CUDA_DEVICE_SM_LIMIT": "0", "CUDA_DEVICE_MEMORY_LIMIT": "0"}
UNTRIED = {
    *("qgpu.io/name", "QGPU_NAME", "nvidia.com/gpumem-percentage"),
    *("qgpu.io/latency-target", "QGPU_LATENCY_TARGET"),  # together with a class, see below
}


ANYTHING = ContainerPolicy(by_environment=RequestBounds())


def places(name, value):
    return ({name: value}, {}, {}) if "/" in name else ({}, {}, {name: value})


@pytest.mark.parametrize("name", SAID)
def test_every_name_means_what_its_makers_say(name):
    value, grant = SAID[name]

    assert wanted(*places(name, value), ANYTHING).grant == grant


def test_no_name_is_left_out_above():
    names = {name for name, _, _ in requested_limits.ANNOTATIONS + requested_limits.ENVIRONMENT}

    assert names - UNTRIED - set(SAID) == {f"CUDA_DEVICE_MEMORY_LIMIT_{card}" for card in range(1, 16)}


@pytest.mark.parametrize("name", NO_LIMIT)
def test_zero_is_no_limit_for_those_who_say_so(name):
    assert wanted(*places(name, NO_LIMIT[name])).grant == Grant()


def test_a_size_of_hamis_below_any_context_is_refused():
    with pytest.raises(InvalidValueError, match="environment CUDA_DEVICE_MEMORY_LIMIT: '16m' is 16 MiB, less than any"):
        wanted({}, {}, {"CUDA_DEVICE_MEMORY_LIMIT": "16m"})


def test_a_latency_target_is_an_online_containers():
    annotated = wanted({"qgpu.io/class": "online", "qgpu.io/latency-target": "2ms"}, {}, {}).grant
    by_variable = wanted({}, {}, {"QGPU_CLASS": "online", "QGPU_LATENCY_TARGET": "2ms"}, ANYTHING).grant

    assert annotated == by_variable == Grant(PodClass.ONLINE, latency_target_ns=2_000_000)
    with pytest.raises(InvalidValueError, match="only online"):
        wanted({"qgpu.io/latency-target": "2ms"}, {}, {})


@pytest.mark.parametrize("name", ["qgpu.io/profiling", "qgpu.io/allow-profiling", "qgpu.io/allow-graphics"])
def test_no_container_allows_itself_profiling(name):
    with pytest.raises(InvalidValueError, match="there is no such limit"):
        wanted({name: "true"}, {}, {}, ANYTHING)
    by_variable = dict.fromkeys(("QGPU_PROFILING", "QGPU_ALLOW_PROFILING", "QGPU_ALLOW_GRAPHICS"), "1")
    assert not wanted({}, {}, by_variable, ANYTHING).grant.profiling
    assert "profiling" not in {field for _, field, _ in requested_limits.ANNOTATIONS + requested_limits.ENVIRONMENT}


def test_what_other_names_there_are_is_nobodys_business():
    assert wanted({"org.example/cores": "x"}, {"app": "web"}, {"PATH": "/bin"}) == requested_limits.RequestedLimits()


def test_annotations_override_labels_override_environment():
    found = wanted(
        {"qgpu.io/cores": "10"},
        {"qgpu.io/cores": "20", "nvidia.com/gpumem": "1024"},
        {"QGPU_CORES": "30", "QGPU_MEMORY": "2GiB", "QGPU_CLASS": "online"},
        ANYTHING,
    )

    assert found.grant == Grant(PodClass.ONLINE, 10, GIB)


def test_names_of_one_place_may_agree():
    assert wanted({"qgpu.io/memory": "3GiB", "aliyun.com/gpu-mem": "3"}, {}, {}).grant == Grant(memory=3 * GIB)


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({"qgpu.io/cores": "40", "nvidia.com/gpucores": "60"}, "contradict"),
        ({"qgpu.io/core": "40"}, "there is no such limit"),
        ({"qgpu.io/cores": "40%"}, "annotation qgpu.io/cores"),
        ({"qgpu.io/cores": "0"}, "1 to 100"),
        ({"tke.cloud.tencent.com/qgpu-core": "200"}, "1 to 100"),
        ({"qgpu.io/memory": "much"}, "annotation qgpu.io/memory"),
        ({"nvidia.com/gpumem": "16"}, "annotation nvidia.com/gpumem: memory limit 16 MiB: less than any CUDA context"),
        ({"qgpu.io/memory": "-1GiB"}, "annotation qgpu.io/memory"),
        ({"nvidia.com/gpumem": "0"}, "positive"),
        ({"qgpu.io/class": "fast"}, "online, offline"),
        ({"nvidia.com/priority": "7"}, "0 is high"),
        ({"nvidia.com/gpumem-percentage": "50"}, "not supported"),
    ],
)
def test_a_doubtful_wish_is_refused_in_one_line_that_names_it(annotations, says):
    with pytest.raises(InvalidValueError, match=says) as refused:
        wanted(annotations, {}, {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "image",
    [
        {"QGPU_CLASS": "online"},
        {"CUDA_TASK_PRIORITY": "0"},
        {"QGPU_CORES": "100"},
        {"CUDA_DEVICE_SM_LIMIT": "51"},
        {"QGPU_NAME": "web"},
    ],
)
def test_an_images_variables_take_nothing_from_others(image):
    with pytest.raises(RefusedError, match="annotation"):
        wanted({}, {}, image)


def test_an_images_variables_may_narrow():
    image = {"QGPU_CLASS": "offline", "QGPU_CORES": "30", "QGPU_MEMORY": "2GiB"}

    assert wanted({}, {}, image).grant == Grant(cores=30, memory=2 * GIB)


def test_an_annotation_goes_before_what_an_image_may_not_ask_for():
    annotations = {"qgpu.io/class": "online", "qgpu.io/cores": "80", "qgpu.io/name": "web"}
    image = {"QGPU_CLASS": "online", "QGPU_CORES": "100", "QGPU_NAME": "other"}

    assert wanted(annotations, {}, image) == requested_limits.RequestedLimits(Grant(PodClass.ONLINE, 80), "web")


def test_an_image_sharpens_no_latency_target():
    with pytest.raises(RefusedError, match="latency target"):
        wanted({"qgpu.io/class": "online"}, {}, {"QGPU_LATENCY_TARGET": "1ms"})


def test_variables_that_are_not_heard_ask_for_nothing():
    deaf = ContainerPolicy(by_environment=None)

    assert wanted(
        {"qgpu.io/cores": "40"}, {}, {"QGPU_MEMORY": "2GiB", "QGPU_NAME": "x"}, deaf
    ) == requested_limits.RequestedLimits(Grant(cores=40))


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({"qgpu.io/class": "online"}, "class online may not"),
        ({"qgpu.io/cores": "41"}, "more than the 40 %"),
        ({"qgpu.io/memory": "3GiB"}, "more than the 2 GiB"),
        ({"nvidia.com/priority": "0"}, "class online"),
    ],
)
@pytest.mark.parametrize("place", ["annotation", "label"])
def test_what_nobody_may_ask_for_is_refused_wherever_it_is_said(annotations, says, place):
    policy = ContainerPolicy(RequestBounds(frozenset({PodClass.OFFLINE}), 40, 2 * GIB))
    with pytest.raises(RefusedError, match=says):
        wanted(*((annotations, {}) if place == "annotation" else ({}, annotations)), {}, policy)
    assert wanted({"qgpu.io/cores": "40", "qgpu.io/memory": "2GiB"}, {}, {}, policy).grant == Grant(
        cores=40, memory=2 * GIB
    )


def test_what_nobody_may_ask_for_a_variable_may_not_either():
    policy = ContainerPolicy(RequestBounds(cores=20), RequestBounds())
    with pytest.raises(RefusedError, match="20 %"):
        wanted({}, {}, {"QGPU_CORES": "30"}, policy)


@pytest.mark.parametrize(
    ("image", "by_environment", "limit"),
    [
        ({}, None, 8),
        ({}, 4, 8),  # it asks for nothing, not for no limit
        ({"CUDA_DEVICE_MEMORY_LIMIT": "0"}, None, 8),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "0"}, 4, 4),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "0"}, 16, 8),
        ({"CUDA_DEVICE_MEMORY_LIMIT_3": "0", "QGPU_CORES": "30"}, 4, 4),
    ],
)
def test_who_asks_for_no_limit_gets_the_most_there_is(image, by_environment, limit):
    most = None if by_environment is None else by_environment * GIB
    found = wanted({}, {}, image, ContainerPolicy(RequestBounds(memory=8 * GIB), RequestBounds(memory=most)))

    assert found.grant.memory == limit * GIB
    assert found.on(80 * GIB) == found.grant
    assert found.on(limit * GIB).memory is None
    assert found.on(GIB).memory is None


def test_a_bound_for_variables_alone_binds_who_uses_them():
    policy = ContainerPolicy(by_environment=RequestBounds(memory=4 * GIB))

    assert wanted({}, {}, {"CUDA_DEVICE_MEMORY_LIMIT": "0"}, policy).grant == Grant(memory=4 * GIB)
    assert wanted({}, {}, {}, policy).grant == Grant()
    annotated = wanted({"qgpu.io/memory": "6GiB"}, {}, {"CUDA_DEVICE_MEMORY_LIMIT": "0"}, policy)
    assert annotated.grant == annotated.on(GIB) == Grant(memory=6 * GIB)


def test_variables_that_are_not_heard_ask_for_no_less_memory():
    deaf = ContainerPolicy(RequestBounds(memory=8 * GIB), by_environment=None)

    assert wanted({}, {}, {"QGPU_MEMORY": "2GiB"}, deaf).grant == Grant(memory=8 * GIB)
