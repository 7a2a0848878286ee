"""The examples for Kueue and Volcano agree with the driver and with what these programs were seen to need."""

import re
from typing import Any

import yaml

from qgpu.k8s.claims import MEMORY
from qgpu.k8s.names import DRIVER
from tests.deploy.tools import MANIFESTS, parse, pod_specs

EXAMPLES = MANIFESTS / "examples"


def configurations() -> list[dict[str, Any]]:
    """Return the configurations for Kueue that its example's comments hold: blocks of indented lines."""
    blocks = re.findall(r"(?:^#     .*\n)+", (EXAMPLES / "kueue.yaml").read_text(), re.MULTILINE)
    return [yaml.safe_load(re.sub(r"^#", "", block, flags=re.MULTILINE)) for block in blocks]


def test_kueues_queue_covers_what_its_mapping_counts() -> None:
    shares = configurations()[0]["resources"]["deviceClassMappings"]
    (queue,) = (each for each in parse((EXAMPLES / "kueue.yaml").read_text()) if each["kind"] == "ClusterQueue")
    (group,) = queue["spec"]["resourceGroups"]

    assert group["coveredResources"] == [each["name"] for each in shares]
    assert [each["name"] for each in group["flavors"][0]["resources"]] == group["coveredResources"]


def test_kueues_mappings_name_classes_that_exist() -> None:
    classes = {each["metadata"]["name"] for each in parse((MANIFESTS / "classes.yaml").read_text())}
    mappings = [each for one in configurations() for each in one["resources"]["deviceClassMappings"]]

    assert len(mappings) == 3
    assert {name for each in mappings for name in each["deviceClassNames"]} == classes


def test_kueue_counts_memory_under_the_drivers_names() -> None:
    memory = configurations()[1]
    (source,) = memory["resources"]["deviceClassMappings"][0]["sources"]

    assert memory["featureGates"] == {"KueueDRAIntegrationConsumableCapacity": True}
    assert (source["capacity"]["name"], source["capacity"]["driver"]) == (MEMORY, DRIVER)


def test_each_pod_of_volcanos_gang_asks_for_cpu_or_memory() -> None:
    """Volcano starts pods without such a request one by one, gang or no gang."""
    specs = list(pod_specs(parse((EXAMPLES / "volcano.yaml").read_text())))
    requests = [container["resources"].get("requests", {}) for spec in specs for container in spec["containers"]]

    assert requests
    assert all({"cpu", "memory"} & set(each) for each in requests)
