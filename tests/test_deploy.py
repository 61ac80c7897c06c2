"""What is in deploy/: read by the programs that it is for, where they are there."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from paged.http.app import create_app
from paged.http.cli import parse
from paged.http.options import ServeOptions
from paged.http.paths import PROBES
from paged.http.replicas.options import read_args
from paged.http.server import TIME_TO_LEAVE
from paged.runtime.flags import read_flags
from tests.http.fakes import FakeEngine, serving
from tests.runtime.remote import wait_until

DEPLOY = Path(__file__).parent.parent / "deploy"


def options_of(argv: list[str]) -> ServeOptions:
    return read_flags(ServeOptions, parse(["serve", *argv]))


def leaves_in(options: ServeOptions) -> float:
    """Seconds that a server may take from the first signal to its end."""
    return options.shutdown_timeout + TIME_TO_LEAVE


def documents(name: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / name).read_text())}


def test_kubernetes() -> None:
    found = documents("kubernetes/deployment.yaml")
    spec = found["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    options = options_of(container["args"])
    sleep = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > leaves_in(options) + sleep
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in PROBES
    assert container["startupProbe"]["httpGet"]["path"] == "/ready"
    # Nobody may end a server that could replace its engine itself.
    liveness = container["livenessProbe"]
    patience = liveness["periodSeconds"] * liveness["failureThreshold"]
    assert patience > options.step_timeout * (1 - 0.25) + 300
    assert spec["securityContext"]["runAsNonRoot"]
    # A second pod could not get a volume that is one node's.
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert found["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    claimed = found["PersistentVolumeClaim"]["metadata"]["name"]
    claims = [each["persistentVolumeClaim"]["claimName"] for each in spec["volumes"][:1]]
    assert claims == [claimed]


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs the program kubectl")
def test_kubectl_reads_it() -> None:
    argv = ["kubectl", "kustomize", str(DEPLOY / "kubernetes")]
    text = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    kinds = [each["kind"] for each in yaml.safe_load_all(text)]
    assert sorted(kinds) == ["Deployment", "PersistentVolumeClaim", "Service"]
    assert "image: paged:latest" in text


def test_ray_service() -> None:
    found = documents("ray/rayservice.yaml")
    spec = found["RayService"]["spec"]
    cluster, config = spec["rayClusterConfig"], yaml.safe_load(spec["serveConfigV2"])
    [workers] = cluster["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    [container], [application] = pod["containers"], config["applications"]
    told = read_args(application["args"])
    assert pod["terminationGracePeriodSeconds"] > leaves_in(told.server)
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == told.gpus
    [replica] = application["deployments"]
    for name in ("min", "max"):  # a pod has one
        most = replica["autoscaling_config"][f"{name}_replicas"]
        assert workers[f"{name}Replicas"] == most
    assert config["http_options"]["port"] in [each["containerPort"] for each in container["ports"]]
    [volume] = pod["volumes"]
    claimed = found["PersistentVolumeClaim"]["metadata"]["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == claimed
    constraints = (DEPLOY.parent / "constraints.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in constraints


def test_the_file_for_ray_serve() -> None:
    config = yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text())
    [application] = config["applications"]
    assert read_args(application["args"]).gpus == 1
    assert [each["name"] for each in application["deployments"]] == ["Replica"]
    assert config["http_options"]["keep_alive_timeout_s"] > ServeOptions.timeout_keep_alive


def test_compose() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    paged = services["paged"]
    options = options_of(["m", *paged["command"][1:]])
    assert float(paged["stop_grace_period"].removesuffix("s")) > leaves_in(options)
    assert (DEPLOY.parent / paged["build"]["dockerfile"]).exists()
    [mounted] = services["nginx"]["volumes"]
    assert (DEPLOY / mounted.partition(":")[0]).exists()


def test_the_image_has_a_user_without_rights_and_all_sources() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users
    assert users[-1] not in ("0", "root")
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text()
    for name in re.findall(r"^!(\S+)$", ignored, re.MULTILINE):
        assert (DEPLOY.parent / name).exists()
    packages = {"http", "models", "paged", "runtime"}
    assert packages <= set(re.findall(r"^!(\S+)$", ignored, re.MULTILINE))


def test_systemd(tmp_path: Path) -> None:
    text = (DEPLOY / "paged.service").read_text()
    [command] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    options = options_of(command.replace("${MODEL}", "m").split()[2:])
    [seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert float(seconds) > leaves_in(options)
    if shutil.which("systemd-analyze"):
        unit = tmp_path / "paged.service"
        unit.write_text(text.replace("/opt/paged/bin/paged", "/bin/true"))
        argv = ["systemd-analyze", "verify", str(unit)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert [line for line in done.stderr.splitlines() if "paged.service" in line] == []


def test_nginx_bounds_the_connections_of_an_address() -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    [zone] = re.findall(r"limit_conn_zone \$binary_remote_addr zone=(\w+):", text)
    assert re.findall(r"^ +limit_conn (\w+) \d+;$", text, re.MULTILINE) == [zone]


@contextmanager
def nginx(folder: Path, url: str) -> Iterator[str]:
    """nginx in front of a server, with the file of deploy/ and other ports and folders."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = (DEPLOY / "nginx.conf").read_text()
    text = text.replace("server paged:8000", f"server {url.removeprefix('http://')}")
    text = text.replace("listen 8080", f"listen 127.0.0.1:{port}").replace("/tmp/", f"{folder}/")
    config = folder / "nginx.conf"
    config.write_text(text)
    argv = ["nginx", "-p", str(folder), "-c", str(config), "-e", "stderr", "-g", "daemon off;"]
    with subprocess.Popen(argv) as process:
        try:
            wait_until(lambda: (folder / "nginx.pid").exists())
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nginx"), reason="needs the program nginx")
def test_nginx_passes_tokens_on_as_they_come(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)  # its workers are another user's
    engine = FakeEngine(answer="x" * 40, pause=0.05)
    app = create_app(engine, ["tiny"])
    with serving(app) as url, nginx(tmp_path, url) as front:
        asked = {"prompt": "a", "stream": True, "max_tokens": 40}
        with httpx2.stream("POST", f"{front}/v1/completions", json=asked, timeout=20) as reply:
            times = [time.monotonic() for line in reply.iter_lines() if '"text"' in line]
        assert len(times) == 40
        assert times[-1] - times[0] > 1
        assert max(after - before for before, after in pairwise(times)) < 0.5

        with httpx2.stream("POST", f"{front}/v1/completions", json=asked) as reply:
            next(reply.iter_lines())
        wait_until(lambda: len(engine.aborted) == 1)

        large = {"prompt": "a" * 33 * 2**20}
        assert httpx2.post(f"{front}/v1/completions", json=large, timeout=20).status_code == 413
        assert httpx2.get(f"{front}/metrics").status_code == 403
        assert httpx2.get(f"{front}/debug/state").status_code == 403
        theirs = httpx2.get(f"{front}/v1/models", headers={"X-Request-Id": "theirs"})
        assert theirs.headers["x-request-id"] == "theirs"
        assert len(httpx2.get(f"{front}/v1/models").headers["x-request-id"]) == 32
        assert httpx2.get(f"{front}/health").status_code == 200
