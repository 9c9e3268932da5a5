"""The files of examples/deploy fit the official schemas, and the command lines in them run on two machines."""

import json
import re
import shlex
import subprocess
import tomllib
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import yaml

from atoll.testing import network_namespaces
from tests.machines import PATIENCE_S, SHORT_RUN, Machine, library_lines, until_said, with_settings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples" / "deploy"
UNAVAILABLE = network_namespaces.unavailable_reason()
on_two_machines = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def check(document, name):
    """Raises where a document does not fit the schema that Docker, Kubernetes or Ray publish."""
    if name == "kubernetes.yaml":
        import kubernetes_validate

        kubernetes_validate.validate(document, "1.33", strict=True)
        return
    module, path = {
        "compose.yaml": ("check_jsonschema", "builtin_schemas/vendor/compose-spec.json"),
        "ray_cluster.yaml": ("ray.autoscaler", "ray-schema.json"),
    }[name]
    schema = json.loads(Path(find_spec(module).submodule_search_locations[0], path).read_text())
    jsonschema.validators.validator_for(schema)(schema).validate(document)


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml", "ray_cluster.yaml"])
def test_a_file_fits_its_official_schema(name):
    for document in documents(name):
        check(document, name)


def test_a_mistyped_field_does_not_fit_the_schema():
    (compose,), (*_, job), (cluster,) = (documents(name) for name in ("compose.yaml", "kubernetes.yaml", "ray_cluster.yaml"))
    compose["services"]["first"]["comand"] = "run"
    job["spec"]["template"]["spec"]["securityContext"]["fsgroup"] = 1000
    cluster["provder"] = {}
    for document, name in ((compose, "compose.yaml"), (job, "kubernetes.yaml"), (cluster, "ray_cluster.yaml")):
        with pytest.raises(jsonschema.ValidationError):
            check(document, name)


def test_names_in_a_file_refer_to_each_other():
    (compose,), (service, policy, claim, job) = documents("compose.yaml"), documents("kubernetes.yaml")
    for one in compose["services"].values():
        assert {*one.get("networks", ()), *(path.partition(":")[0] for path in one.get("volumes", ()))} <= {
            *compose["networks"],
            *compose["volumes"],
        }
        assert set(one.get("depends_on", ())) <= compose["services"].keys()
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"] == service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert f"--master-addr {job['metadata']['name']}-0.{service['metadata']['name']} " in pod["spec"]["containers"][0]["args"][0]


def test_the_users_of_image_and_pod_are_one_and_own_the_volume():
    (user,) = re.findall(r"^USER (\d+):\d+$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert f"useradd --uid {user} " in (DEPLOY / "Dockerfile").read_text()
    pod = documents("kubernetes.yaml")[-1]["spec"]["template"]["spec"]
    assert {"runAsUser": int(user), "fsGroup": int(user)}.items() <= pod["securityContext"].items()
    (container,) = pod["containers"]
    assert container["imagePullPolicy"] == "IfNotPresent", "an image without a tag would be pulled from a public registry"


def test_ray_up_starts_the_workers_and_installs_atoll_on_all_machines():
    (cluster,) = documents("ray_cluster.yaml")
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in cluster["head_start_ray_commands"][-1].split()
    (folder,) = re.findall(r'pip install "\$HOME/([\w-]+)\[ray\]"', " ".join(cluster["setup_commands"]))
    copied = {there.removeprefix(f"~/{folder}/"): here for there, here in cluster["file_mounts"].items() if folder in there}
    assert {"src", "pyproject.toml", "README.md", "LICENSE"} == copied.keys()
    for there, here in copied.items():
        assert there == here
        assert (ROOT / here).exists()


def test_the_dockerfile_copies_files_that_there_are_and_installs_extras_that_there_are():
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= {"FROM", "ARG", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT"}
    for line in lines:
        if line.startswith("COPY"):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.search(r"/source\[([\w,]+)\]", text)[1].split(",")) <= extras.keys()
    assert json.loads(re.search(r"^ENTRYPOINT (.*)$", text, flags=re.MULTILINE)[1]) == ["atoll"]
    assert documents("compose.yaml")[0]["services"]["first"]["build"]["dockerfile"] == "examples/deploy/Dockerfile"


# ------------------------------------------------------------------------------------------------------------ two machines


@contextmanager
def machines(folder, first, second, *, first_is_loopback=True):
    """Two machines of these names. Those of containers resolve their own name to their address, others to 127.0.0.1."""
    with network_namespaces.linked_pair() as (one, two):
        own = "127.0.0.1" if first_is_loopback else one.address
        yield (
            Machine(one, folder / "one", first, [f"{own} {first}"]),
            Machine(two, folder / "two", second, [f"127.0.0.1 {second}", f"{one.address} {first}"]),
        )


def of_first(compose):
    """What compose hands to the shell of the first container. In a compose file `$$` is one dollar."""
    first = compose["services"]["first"]
    assert first["entrypoint"] == ["sh", "-c"]
    (line,) = first["command"]
    return line.replace("$$", "$").removeprefix("exec ")


def both_end(one, two, here, there):
    """Types a line on each machine; what both said when they have ended."""
    with one.started(here, "screen") as first, two.started(there, "screen") as second:
        ends = first.wait(PATIENCE_S), second.wait(PATIENCE_S)
        assert ends == (0, 0), first.log.read_text() + second.log.read_text()
        return first.log.read_text(), second.log.read_text()


@pytest.mark.slow
@on_two_machines
def test_the_commands_of_the_compose_file_run_an_elastic_run_with_a_joiner_that_says_what_it_does(tmp_path):
    (compose,) = documents("compose.yaml")
    services = compose["services"]
    here, there = (line.replace("/runs/", "runs/") for line in (of_first(compose), f"atoll {services['joiner']['command']}"))
    slow = ("train.steps=120", "cluster.step_time_s=[0.02]", "engine.step_delay=1.0")
    with machines(tmp_path, services["first"]["hostname"], "joiner", first_is_loopback=False) as (one, two):
        said, joined = both_end(one, two, with_settings(here, [*SHORT_RUN, *slow]), there)
        log = Path(re.search(r"found the run of demo-diloco, and joins it as \S+; log: (\S+)", joined)[1])
        assert re.search(r"demo-diloco: training +\d+ % +loss \d", joined)
        assert re.search(
            r"finished: \S+ took part in \d+ commits, \d+ with work of its own, up to step \d+ of 120, loss \d", joined
        )
        assert "committed round" in log.read_text()
        assert "committed round" not in joined
        assert library_lines(said + joined) == []
        assert (one.folder / "runs/demo/final.safetensors").exists()
        assert "folder: runs/demo" in one.typed(here), "a second `up` resumes the folder"


@pytest.mark.slow
@on_two_machines
def test_the_command_of_the_kubernetes_job_trains_in_two_pods(tmp_path):
    (container,) = documents("kubernetes.yaml")[-1]["spec"]["template"]["spec"]["containers"]
    line = container["args"][0].replace("/runs/", "runs/")
    with machines(tmp_path, "atoll-0.atoll", "atoll-1.atoll") as both:
        for index, machine in enumerate(both):
            machine.environment["JOB_COMPLETION_INDEX"] = str(index)
        said, _ = both_end(*both, *[with_settings(line, SHORT_RUN)] * 2)
        assert "finished: val loss" in said
        # A Job that is applied again resumes, where a new run would be refused: the folder is not empty.
        both_end(*both, line, line)


@pytest.mark.slow
@on_two_machines
def test_a_name_that_is_a_loopback_address_is_refused_where_other_machines_are_to_dial_it(tmp_path):
    here = of_first(documents("compose.yaml")[0])
    with machines(tmp_path, "first", "second") as (one, _):
        said = one.typed(here, code=2)
        assert "engine.listen=first:29400: first is 127.0.0.1 here, which no other machine reaches. This machine has isle0" in said
        said = one.typed("atoll run demo-async --engine ray --set engine.address=first:6379", code=2)
        assert "first is 127.0.0.1 here, where a cluster of several machines does not listen: use the head's IP address" in said


@pytest.mark.slow
@on_two_machines
def test_the_slurm_script_starts_a_rank_on_each_node(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\necho first.example\necho second.example\n")
    (tools / "srun").write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    slurm = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "any", "SLURM_JOB_ID": "7"}
    script = subprocess.run(["bash", DEPLOY / "slurm.sh"], env=slurm, capture_output=True, text=True, check=True)
    bash, option, line = script.stdout.rstrip("\0").split("\0")
    assert (bash, option) == ("bash", "-c")
    with machines(tmp_path, "first.example", "second.example") as both:
        for number, machine in enumerate(both):
            machine.environment["SLURM_NODEID"] = str(number)
        said, _ = both_end(*both, *[with_settings(" ".join(line.split()), SHORT_RUN)] * 2)
        assert "folder: runs/slurm-7" in said


@pytest.mark.slow
@on_two_machines
def test_the_commands_of_the_ray_cluster_run_an_asynchronous_run_on_two_machines(tmp_path):
    (cluster,) = documents("ray_cluster.yaml")
    comment = re.search(r"^# ray exec \S+ '(.*)'$", (DEPLOY / "ray_cluster.yaml").read_text(), flags=re.MULTILINE)[1]
    head, worker = (cluster[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker"))
    assert cluster["head_start_ray_commands"][0] == cluster["worker_start_ray_commands"][0] == "ray stop"
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    with machines(tmp_path, "head", "worker") as (one, two):
        where = cluster["provider"]["head_ip"]
        addresses = {where: one.namespace.address, cluster["provider"]["worker_ips"][0]: two.namespace.address}
        for machine in (one, two):
            machine.environment |= {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}

        def line(text):
            for given, address in addresses.items():
                text = text.replace(given, address)
            return text

        # The head's autoscaler starts the workers over ssh; here the test types their line.
        head = head.replace(" --autoscaling-config=~/ray_bootstrap_config.yaml", "")
        limits = f" --num-cpus 2 --object-store-memory {128 << 20} --block"
        run = with_settings(line(comment), ["train.steps=20", "train.warm_start_steps=0", "train.batch_size=2", "train.device=cpu"])
        with one.started(f"env {line(head)}{limits}", "ray") as first:
            until_said(first, "Ray runtime started")
            with two.started(f"env {line(worker)}{limits}", "ray") as second:
                until_said(second, "Ray runtime started")
                said = one.typed(run)
    assert "finished: val loss" in said
    assert shlex.split(comment)[0] == "atoll"
