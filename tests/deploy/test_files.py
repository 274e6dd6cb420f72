"""What deploy/ holds is legal where it is read: Docker, compose, Kubernetes, KubeRay, Prometheus, Ray's launcher."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml

from rayzero.recipes.recipe import load_recipe

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERAY = Path(__file__).with_name("kuberay.json")  # made by reduce_crds.py
MANIFESTS = [DEPLOY / "kubernetes" / name for name in ("raycluster.yaml", "rayjob.yaml")]
KUBERNETES = "1.32"


def run(*command: str, cwd: Path) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.promise("installs", "jobs")
@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").iterdir()), ids=lambda path: path.name)
def test_what_images_copy_is_there(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    copies = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY") and "--from" not in line]
    sources = [word for words in copies for word in words if not word.startswith("--")]
    assert {"rayzero", "deploy/recipe.yaml"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert "-c constraints.txt" in text
    assert "USER ray" in text
    last_stage = text.rpartition("\nFROM ")[2]
    assert re.search(r"apt-get install .* wget ", last_stage), "KubeRay's probes before 1.6 call it"


@pytest.mark.promise("installs", "hosts")
def test_compose_is_legal_and_what_it_mounts_is_there() -> None:
    path = DEPLOY / "compose" / "docker-compose.yaml"
    described = yaml.safe_load(path.read_text())
    mounts = [volume for service in described["services"].values() for volume in service.get("volumes", [])]
    paths = [mount.partition(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(paths) == 4
    assert [source for source in paths if not (path.parent / source).exists()] == []
    run("docker-compose", "-f", path.name, "config", "-q", cwd=path.parent)


def test_prometheus_reads_its_configuration(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "prometheus" / "prometheus.yaml", tmp_path)
    shutil.copy(ROOT / "dashboards" / "prometheus" / "rules.yaml", tmp_path)
    said = run("promtool", "check", "config", "prometheus.yaml", cwd=tmp_path)
    assert "SUCCESS: 1 rule files found" in said


def test_prometheus_reads_its_configuration_without_containers_from_where_it_lies() -> None:
    said = run("promtool", "check", "config", "deploy/prometheus/local.yaml", cwd=ROOT)
    assert "SUCCESS: 1 rule files found" in said


def test_without_containers_prometheus_looks_where_the_submitted_run_writes_its_targets() -> None:
    page = five_commands()
    submitted = re.search(r"rayzero train recipe.yaml (.*)", page)[1].replace('"$PWD', f'"{ROOT}').replace('"', "")
    writes = load_recipe(DEPLOY / "recipe.yaml", submitted.split()).run.discovery_dir
    config = ROOT / re.search(r"--config\.file=(\S+)", page)[1]
    ours, rays = yaml.safe_load(config.read_text())["scrape_configs"]
    (pattern,) = ours["file_sd_configs"][0]["files"]
    assert (config.parent / pattern).resolve() == writes / "*.json"
    assert rays["file_sd_configs"][0]["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]


def test_without_containers_the_token_is_settled_before_ray_starts_and_nothing_is_written_where_no_folder_is() -> None:
    page = five_commands()
    assert page.index("export RAY_AUTH_MODE=token") < page.index("ray start --head") < page.index("ray job submit")
    assert re.findall(r"> (\S+)", page) == ["/dev/null"], "runs/ is not there before the job has started"


def five_commands() -> str:
    """Those of the page's part on one machine without containers."""
    text = (DEPLOY / "README.md").read_text().partition("## One machine, no containers")[2]
    block = text.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    assert len(block.splitlines()) == 5
    return block


def kuberay(manifest: dict[str, Any]) -> list[str]:
    """What KubeRay's schema says is wrong, by the path of the place."""
    held = json.loads(KUBERAY.read_text())
    schema = {**held["kinds"][manifest["kind"]], "$defs": held["$defs"]}
    return [error.json_path for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kuberay_takes_the_manifest(path: Path) -> None:
    assert kuberay(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    ("place", "name", "value", "wrong"),
    [
        (("workerGroupSpecs", 0), "replica", 2, "$.spec.rayClusterSpec.workerGroupSpecs[0]"),
        (
            ("headGroupSpec", "template", "spec", "containers", 0),
            "imagePolicy",
            "Always",
            "$.spec.rayClusterSpec.headGroupSpec.template.spec.containers[0]",
        ),
        (("headGroupSpec",), "template", None, "$.spec.rayClusterSpec.headGroupSpec.template"),
    ],
)
def test_the_schema_that_is_kept_refuses_what_kuberay_refuses(
    place: tuple[str | int, ...], name: str, value: Any, wrong: str
) -> None:
    manifest = yaml.safe_load(MANIFESTS[1].read_text())
    at = manifest["spec"]["rayClusterSpec"]
    for key in place:
        at = at[key]
    at[name] = value
    assert kuberay(manifest) == [wrong]


def pods(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and pod template of every group."""
    spec = yaml.safe_load(path.read_text())["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_pods_are_pods_and_shared_memory_is_theirs(path: Path) -> None:
    for name, template in pods(path):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        if name == "head":
            continue
        (container,) = template["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        shm = mounts["/dev/shm"]["emptyDir"]
        assert shm["medium"] == "Memory"
        assert gibibytes(shm["sizeLimit"]) < gibibytes(container["resources"]["limits"]["memory"]), "it counts as used"
        assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == "rayzero-runs"


def gibibytes(text: str) -> int:
    return int(re.fullmatch(r"(\d+)Gi", text)[1])


def test_both_manifests_describe_the_same_cluster() -> None:
    cluster, job = (yaml.safe_load(path.read_text())["spec"] for path in MANIFESTS)
    assert cluster == job["rayClusterSpec"]


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """What kubectl makes of a folder; skips without a kubectl of this decade, whose kustomize knows inline patches."""
    told = json.loads(run("kubectl", "version", "--client", "-o", "json", cwd=ROOT))
    if int(told["clientVersion"]["minor"].rstrip("+")) < 24:
        pytest.skip(f"kubectl {told['clientVersion']['gitVersion']} is older than 1.24")
    return list(yaml.safe_load_all(run("kubectl", "kustomize", str(folder), cwd=ROOT)))


def test_the_overlay_for_gpu_nodes_is_legal_and_its_sums_agree() -> None:
    made = {one["kind"]: one for one in kustomized(DEPLOY / "kubernetes-gpu")}
    assert set(made) == {"Service", "ScrapeConfig", "PodMonitor", "PersistentVolumeClaim", "RayJob"}
    job = made["RayJob"]
    assert kuberay(job) == []
    kubernetes_validate.validate(made["PersistentVolumeClaim"], KUBERNETES, strict=True)
    recipe = load_recipe(DEPLOY / "recipe.yaml", job["spec"]["entrypoint"].split()[3:])
    gpus, cpus = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    described = [gpus["template"]["spec"], cpus["template"]["spec"]]
    for name, spec in zip(("gpus", "cpus"), described, strict=True):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        (container,) = spec["containers"]
        assert container["image"].startswith("registry.example.com/rayzero:")
        (shm,) = (volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm")
        assert gibibytes(shm["sizeLimit"]) < gibibytes(container["resources"]["limits"]["memory"])
    each = int(described[0]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus["replicas"] * each == recipe.scaling.num_workers == 16
    assert described[0]["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_optimizers_go_where_the_label_is() -> None:
    job = yaml.safe_load(MANIFESTS[1].read_text())["spec"]
    assert "zero.placement=cpu_nodes" in job["entrypoint"]
    wanted = load_recipe(DEPLOY / "recipe.yaml").scaling.optimizer_labels
    assert [g["groupName"] for g in job["rayClusterSpec"]["workerGroupSpecs"] if g["labels"] == wanted] == [
        "cpu-optimizers"
    ]


def test_entrypoints_are_command_lines_that_rayzero_takes() -> None:
    entrypoint = yaml.safe_load(MANIFESTS[1].read_text())["spec"]["entrypoint"].split()
    assert entrypoint[:3] == ["rayzero", "train", "recipe.yaml"]
    recipe = load_recipe(DEPLOY / "recipe.yaml", entrypoint[3:])
    assert (recipe.zero.placement, recipe.run.storage_path) == ("cpu_nodes", "/runs")
    submitted = re.search(r"rayzero train recipe.yaml (.*)", (DEPLOY / "compose" / "docker-compose.yaml").read_text())[
        1
    ]
    assert load_recipe(DEPLOY / "recipe.yaml", submitted.split()).run.storage_path == "/runs"


def test_discovery_is_served_where_prometheus_asks() -> None:
    service, scrape, _ = yaml.safe_load_all((DEPLOY / "kubernetes" / "monitoring.yaml").read_text())
    kubernetes_validate.validate(service, KUBERNETES, strict=True)
    kubernetes_validate.validate(
        yaml.safe_load((DEPLOY / "kubernetes" / "storage.yaml").read_text()), KUBERNETES, strict=True
    )
    job = yaml.safe_load(MANIFESTS[1].read_text())["spec"]
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]
    assert head["metadata"]["labels"] == service["spec"]["selector"]
    port = load_recipe(DEPLOY / "recipe.yaml", job["entrypoint"].split()[3:]).run.telemetry.port
    (published,) = service["spec"]["ports"]
    url = scrape["spec"]["httpSDConfigs"][0]["url"]
    assert published["targetPort"] == port
    assert url == f"http://{service['metadata']['name']}:{published['port']}/sd"


def test_rays_launcher_takes_its_file() -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((DEPLOY / "vm" / "cluster.yaml").read_text()), schema)


def test_kustomize_makes_dashboards_and_rules() -> None:
    made = list(yaml.safe_load_all(run("kubectl", "kustomize", ".", cwd=ROOT / "dashboards")))
    assert {one["kind"] for one in made} == {"ConfigMap", "PrometheusRule"}
    boards = next(one for one in made if one["kind"] == "ConfigMap")
    assert set(boards["data"]) == {path.name for path in (ROOT / "dashboards" / "json").glob("*.json")}
    assert boards["metadata"]["labels"] == {"grafana_dashboard": "1"}
