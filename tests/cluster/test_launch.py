"""The launch files, checked without a network: Ray's schema, EC2's API model, Kubernetes' ways."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from adjoint.files.remote import is_remote
from adjoint.train.config import load_config

ROOT = Path(__file__).resolve().parents[2]
AWS = sorted((ROOT / "adjoint" / "cluster" / "aws").glob("*.yaml"))
KUBERAY = sorted((ROOT / "adjoint" / "cluster" / "kuberay").glob("*.yaml"))
RAY_JOB = KUBERAY[0].with_name("rayjob.yaml")
RAY_CLUSTERS = [path for path in KUBERAY if path != RAY_JOB]
PROFILE = re.compile(r"nvidia\.com/mig-(\d+g\.\d+gb)")


def loaded(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def node_types(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(config["available_node_types"].items())


@pytest.fixture(scope="module")
def ec2() -> Any:
    """EC2's API model, as botocore ships it."""
    pytest.importorskip("botocore")
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    return ServiceModel(Loader().load_service_model("ec2", "service-2"))


def complaints(ec2: Any, node_config: dict[str, Any]) -> str:
    """Return botocore's complaints about a node's configuration as arguments of RunInstances, "" if none."""
    from botocore.validate import ParamValidator

    counts = {"MinCount": 1, "MaxCount": 1}  # Ray's own
    shape = ec2.operation_model("RunInstances").input_shape
    return ParamValidator().validate({**node_config, **counts}, shape).generate_report()


@pytest.mark.parametrize("path", AWS, ids=lambda path: path.stem)
def test_ray_takes_the_file(path: Path) -> None:
    pytest.importorskip("ray")
    jsonschema = pytest.importorskip("jsonschema")
    from ray.autoscaler._private.util import fillout_defaults, validate_config

    config = loaded(path)
    validate_config(fillout_defaults(config))
    with pytest.raises(jsonschema.ValidationError):  # the schema does look
        validate_config(fillout_defaults(config) | {"max_worker": 1})


@pytest.mark.parametrize("path", AWS, ids=lambda path: path.stem)
def test_ec2_knows_every_field_and_value(path: Path, ec2: Any) -> None:
    types = ec2.shape_for("InstanceType").enum
    for _, node in node_types(loaded(path)):
        node_config = node["node_config"]
        assert complaints(ec2, node_config) == ""
        assert node_config["InstanceType"] in types
        assert "Unknown parameter" in complaints(ec2, node_config | {"SubnetIds": ["subnet-1"]})
        assert "Invalid type" in complaints(ec2, node_config | {"Placement": "adjoint"})
        for disk in node_config["BlockDeviceMappings"]:
            assert disk["Ebs"]["VolumeType"] in ec2.shape_for("VolumeType").enum
        market = node_config.get("InstanceMarketOptions", {}).get("MarketType", "spot")
        assert market in ec2.shape_for("MarketType").enum


def test_p4d_is_five_instances_with_an_efa_interface_a_card() -> None:
    config = loaded(ROOT / "adjoint" / "cluster" / "aws" / "p4d.yaml")
    assert 1 + config["available_node_types"]["p4d-worker"]["min_workers"] == 5 == 1 + config["max_workers"]
    assert config["provider"]["use_internal_ips"]  # several interfaces: no public address
    assert "," not in config["provider"]["availability_zone"]  # the subnet's own
    for _, node in node_types(config):
        assert node["resources"] == {"CPU": 96, "GPU": 8}
        assert node["node_config"]["Placement"] == {"GroupName": "adjoint-p4d"}
        interfaces = node["node_config"]["NetworkInterfaces"]
        expected = {"InterfaceType": "efa", "SubnetId": config["metadata"]["subnet"]}
        expected["Groups"] = config["metadata"]["group"]
        assert [i["NetworkCardIndex"] for i in interfaces] == [0, 1, 2, 3]
        assert [i["DeviceIndex"] for i in interfaces] == [0, 1, 1, 1]
        assert all(i.items() >= expected.items() for i in interfaces)
        assert not {"SubnetId", "SubnetIds", "SecurityGroupIds"} & node["node_config"].keys()


@pytest.mark.parametrize("path", AWS, ids=lambda path: path.stem)
def test_what_must_be_filled_in_is_named_once(path: Path) -> None:
    """Identifiers of somebody's account stand under `metadata` and nowhere else."""
    text = re.sub(r"#.*", "", path.read_text())
    for name, value in loaded(path)["metadata"].items():
        (identifier,) = value if isinstance(value, list) else re.findall(r"\w+-0{17}", value)
        assert re.fullmatch(r"(ami|subnet|sg|fs)-0{17}", identifier)
        assert text.count(identifier) == 1 and f"*{name}" in text


@pytest.mark.parametrize("path", AWS, ids=lambda path: path.stem)
@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_start_commands_are_what_a_shell_and_ray_understand(path: Path, commands: str) -> None:
    """The last command, run by bash with `adjoint` and `ray` replaced, ends in a `ray start` of options that
    Ray has, with the devices that `adjoint cluster env` named."""
    pytest.importorskip("ray")
    from ray.scripts.scripts import start

    stop, command = loaded(path)[commands]
    assert stop.endswith("ray stop")
    doubles = """
adjoint() {
    [ "$1 $2" = "cluster env" ] && echo "CUDA_VISIBLE_DEVICES=MIG-a ray start ${3#--start=} --num-gpus=1"
}
ray() { echo "$CUDA_VISIBLE_DEVICES" "$RAY_AUTH_MODE" "$@"; }
"""
    environ = {"HOME": "/home/ubuntu", "RAY_HEAD_IP": "10.0.0.1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", f"{doubles}{command}"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    device, auth, start_word, *words = shlex.split(done.stdout)
    assert (device, auth, start_word) == ("MIG-a", "token", "start")
    options_of_ray = {option for parameter in start.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words} <= options_of_ray
    options = dict(word.partition("=")[::2] for word in words)
    assert options["--num-gpus"] == "1"
    if commands.startswith("head"):
        assert "--head" in options and options["--dashboard-host"] == "127.0.0.1"
        assert options["--autoscaling-config"] == "/home/ubuntu/ray_bootstrap_config.yaml"
    else:
        assert options["--address"] == "10.0.0.1:6379"


@pytest.mark.parametrize("path", AWS, ids=lambda path: path.stem)
def test_setup_commands_parse_and_install_what_this_repository_offers(path: Path) -> None:
    config = loaded(path)
    for command in config["setup_commands"]:
        subprocess.run(["bash", "-n", "-c", command], check=True, timeout=60)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(r"adjoint\[([\w,]+)\]", config["setup_commands"][-1])
    assert {"cluster", "finetune"} == {*installed.split(",")} <= extras.keys()  # transformers is in finetune
    assert config["file_mounts"]["/home/ubuntu/adjoint"] == "."  # where constraints.txt then lies
    assert (ROOT / "constraints.txt").exists()


@pytest.mark.parametrize("path", AWS, ids=lambda path: path.stem)
def test_all_nodes_mount_one_file_system_where_the_walk_through_has_its_runs(path: Path) -> None:
    config = loaded(path)
    mount = config["setup_commands"][0]
    assert mount == config["metadata"]["mount"] and mount.endswith("sudo chown ubuntu /shared")
    done: list[str] = []
    doubles = 'sudo() { echo "sudo $*"; }; mountpoint() { false; }; '
    for command in (mount, mount.replace("mountpoint -q", "true")):
        result = subprocess.run(["bash", "-c", doubles + command], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        done.append(result.stdout)
    assert re.search(r"sudo mount -t nfs4 -o \S+ fs-0+\.efs\.[\w-]+\.amazonaws\.com:/ /shared", done[0])
    assert "sudo mount" not in done[1]  # it is mounted already
    guide = (ROOT / "docs" / "cluster.md").read_text()
    assert "--run.dir /shared/runs/first" in guide and "/home/ubuntu/runs" not in guide


@pytest.mark.parametrize("path", RAY_CLUSTERS, ids=lambda path: path.stem)
def test_kuberay_pods_share_a_folder(path: Path) -> None:
    spec = loaded(path)["spec"]
    claims = set()
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (volume,) = pod["volumes"]
        claims.add(volume["persistentVolumeClaim"]["claimName"])
        for container in pod["containers"]:
            assert {"name": volume["name"], "mountPath": "/shared"} in container["volumeMounts"]
    assert (
        claims == {"adjoint-shared"} and f"name: {claims.pop()}" in (ROOT / "docs" / "cluster.md").read_text()
    )


@pytest.mark.parametrize("path", RAY_CLUSTERS, ids=lambda path: path.stem)
def test_kuberay_pods_have_one_slice_each_and_say_so_to_ray(path: Path) -> None:
    cluster = loaded(path)
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert f"ray=={spec['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert spec["authOptions"] == {"mode": "token"}
    head = spec["headGroupSpec"]
    assert head["rayStartParams"]["num-gpus"] == "0" and head["serviceType"] == "ClusterIP"
    images = {group_container(head)["image"]}
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        container = group_container(group)
        images.add(container["image"])
        limits = container["resources"]["limits"]
        assert limits == container["resources"]["requests"]
        (profile,) = (match[1] for match in map(PROFILE.fullmatch, limits) if match)
        assert limits[f"nvidia.com/mig-{profile}"] == 1 and "nvidia.com/gpu" not in limits
        # a string of a string: the operator pastes it into a command line as it is
        (stated,) = shlex.split(group["rayStartParams"]["resources"])
        assert json.loads(stated) == {"mig_slice": 1, f"mig-{profile}": 1}
        assert group["rayStartParams"]["num-gpus"] == "1"
    assert len(images) == 1


def test_a_ray_job_trains_in_a_bucket_and_goes_on_after_a_failure() -> None:
    """The file has fields of KubeRay's RayJob v1, and a command of `adjoint train` with a shard per GPU."""
    job = loaded(RAY_JOB)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"} and len(job["metadata"]["name"]) <= 47
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert spec.keys() == {
        "entrypoint",
        "backoffLimit",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
        "rayClusterSpec",
    }
    assert cluster.keys() == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert spec["backoffLimit"] > 0 and spec["shutdownAfterJobFinishes"] is True
    command, subcommand, *words = shlex.split(spec["entrypoint"])
    assert (command, subcommand) == ("adjoint", "train") and "\n" not in spec["entrypoint"]
    config = load_config(words)
    assert is_remote(config.run.dir) and is_remote(config.data.path) and config.run.resume == "auto"
    assert 0 < config.training.save_every < config.training.steps
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert cluster["authOptions"] == {"mode": "token"}
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-gpus"] == "0" and head["serviceType"] == "ClusterIP"
    assert "num-gpus" not in workers["rayStartParams"]  # the operator counts whole GPUs
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    assert workers["replicas"] == config.cluster.shards
    resources = group_container(workers)["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == 1
    pods = [group["template"]["spec"] for group in (head, workers)]
    assert {pod["serviceAccountName"] for pod in pods} == {"adjoint"}
    assert not any("volumes" in pod for pod in pods)
    assert len({group_container(group)["image"] for group in (head, workers)}) == 1
    guide = (ROOT / "docs" / "cluster.md").read_text()
    assert "kubectl create -f cluster/kuberay/rayjob.yaml" in guide and "[cluster,finetune,remote]" in guide


def group_container(group: dict[str, Any]) -> dict[str, Any]:
    assert all(
        isinstance(value, str) for value in group["rayStartParams"].values()
    )  # as the operator has them
    (container,) = group["template"]["spec"]["containers"]
    return container


def test_launch_files_are_package_data_and_linked() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = ROOT / "adjoint" / "cluster"
    shipped = {path for pattern in data["adjoint.cluster"] for path in package.glob(pattern)}
    assert shipped == set(package.rglob("*.yaml")) == {*AWS, *KUBERAY} and len(shipped) == 4
    assert (ROOT / "cluster" / "aws" / "p4d.yaml").samefile(AWS[-1])
