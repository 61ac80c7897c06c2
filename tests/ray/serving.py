"""Ray, Ray Serve on it, and what the tests ask of both."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

APP = "paged"
NAME = "demo"
PAGE_SIZE = 16
NUM_PAGES = 86
# The demo model with few shapes to compile, and room for little.
_SMALL = {
    "served_model_name": NAME,
    "max_model_len": 512,
    "kv_cache_memory_bytes": "64m",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "gpus_per_replica": 0,
    "cpus_per_replica": 1,
    "shutdown_timeout": 60,
}
_SECONDS_TO_START = 240


def wait_until(holds: Callable[[], bool], seconds: float = _SECONDS_TO_START) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.2)


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up.

    Attributes:
        url: of Ray Serve's proxy.
        folder: for files of the tests.
        port: of the same.
    """

    url: str
    folder: Path
    port: int

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator[Cluster]:
        import ray
        from ray import serve

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ray.init(
            num_cpus=16,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield cls(f"http://127.0.0.1:{port}", folder, port)
            serve.shutdown()
        finally:
            ray.shutdown()

    def serve(
        self, num_replicas: int = 1, scaling: dict[str, Any] | None = None, **args: Any
    ) -> None:
        """Have the application as described, by way of a file, and wait for it.

        Replicas are the same as before if the arguments are.

        Args:
            scaling: how the number of replicas follows the load, in place of a number.
        """
        import ray

        how = {"num_replicas": num_replicas} if scaling is None else {"autoscaling_config": scaling}
        app = {
            "name": APP,
            "import_path": "paged:serve_app",
            "route_prefix": "/",
            "args": {**_SMALL, "compile_cache_dir": str(self.folder / "programs"), **args},
            "deployments": [{"name": "Replica", **how}],
        }
        file = self.folder / "serve.yaml"
        http = {"host": "127.0.0.1", "port": self.port}
        file.write_text(yaml.safe_dump({"http_options": http, "applications": [app]}))
        before = self._deployed_at()
        address = ray.get_runtime_context().gcs_address
        program = str(Path(sys.executable).parent / "serve")
        argv = [program, "run", "--non-blocking", "--address", address, str(file)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS_TO_START)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: self._deployed_at() > before)
        self.await_replicas(num_replicas)

    def await_replicas(self, number: int) -> None:
        """Wait until so many, and no others, take requests."""
        from ray import serve

        def are_there() -> bool:
            app = serve.status().applications[APP]
            assert app.status != "DEPLOY_FAILED", app.message
            states = app.deployments["Replica"].replica_states if app.deployments else {}
            return app.status == "RUNNING" and dict(states) == {"RUNNING": number}

        wait_until(are_there)

    def _deployed_at(self) -> float:
        from ray import serve

        apps = serve.status().applications
        return float(apps[APP].last_deployed_time_s) if APP in apps else 0.0

    def replicas(self) -> list[psutil.Process]:
        """The processes of replicas, by what Serve knows: their titles change with each call."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeInstanceDetails

        client = _get_global_client()
        assert client is not None
        app = ServeInstanceDetails(**client.get_serve_details()).applications[APP]
        found = [each.pid for each in app.deployments["Replica"].replicas]
        return [psutil.Process(pid) for pid in found if pid is not None]

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json={"model": NAME, **body}, timeout=120)

    def complete(self, prompt: str | list[int], **params: Any) -> httpx2.Response:
        return self.post("/v1/completions", prompt=prompt, temperature=0, **params)

    def counted(self, name: str) -> dict[str, float]:
        """A counter's value, by replica."""
        text = httpx2.get(f"{self.url}/metrics", timeout=60).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    replica = sample.labels["replica"]
                    found[replica] = found.get(replica, 0) + sample.value
        return found


def family(process: psutil.Process) -> list[psutil.Process]:
    """It and those that it has started."""
    return [process, *process.children(recursive=True)]


def await_end(processes: Iterable[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(list(processes), 30)
    assert not alive, f"they do not end: {alive}"


@dataclass
class Load:
    """Requests without an end, from so many clients at a time.

    Attributes:
        num_done: those that were answered as they should be.
        wrong: what others were answered.
    """

    cluster: Cluster
    num_clients: int
    max_tokens: int = 8
    num_done: int = 0
    wrong: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def going_on(self) -> Iterator[Load]:
        numbers = range(self.num_clients)
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(120)

    def await_more(self, number: int) -> None:
        """Wait until so many more are answered."""
        goal = self.num_done + number
        wait_until(lambda: self.num_done >= goal or bool(self.wrong))

    def _ask(self, number: int) -> None:
        asked = 0
        while not self._stop.is_set():
            asked += 1
            how = {"max_tokens": self.max_tokens, "ignore_eos": True}
            try:
                reply = self.cluster.complete(f"Client {number} asks {asked}:", **how)
            except httpx2.HTTPError as error:
                self.wrong.append(repr(error))
                continue
            if reply.status_code != 200:
                self.wrong.append(reply.text)
            elif reply.json()["usage"]["completion_tokens"] == self.max_tokens:
                self.num_done += 1
            else:
                self.wrong.append(reply.text)
