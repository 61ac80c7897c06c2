"""What `paged.serve_app` understands, and what it says where it does not."""

import sys
from typing import Any, get_type_hints

import pytest

import paged
from paged.http.options import ServeOptions
from paged.http.replicas.options import ReplicaOptions, read_args
from paged.runtime.errors import ConfigError
from paged.runtime.flags import choices_of
from paged.runtime.routing import POLICIES

ON_GPU = {"tensor_parallel_size": 4}


def test_flags_of_the_server_go_to_the_replicas() -> None:
    told = read_args({"model": "m", "max-num-seqs": 8, "num_replicas": 2, "api_key": ["a", "b"]})
    assert told.flags == ("--model=m", "--max-num-seqs=8", "--api-key", "a", "b")
    assert told.options == ReplicaOptions(num_replicas=2)
    assert told.server == ServeOptions(api_key=("a", "b"))


def test_a_command_line_hands_on_text() -> None:
    told = read_args({"num_replicas": "2", "max_replicas": "3", "engine_process": "false"})
    assert told.options == ReplicaOptions(num_replicas=2, max_replicas=3)
    assert not told.server.engine_process


@pytest.mark.parametrize(
    ("args", "gpus"),
    [
        ({}, 1),
        (ON_GPU, 4),
        ({"gpus_per_replica": 0}, 0),
        ({"gpus_per_replica": 0.5}, 0.5),
        ({**ON_GPU, "gpus_per_replica": 0}, 0),
        ({**ON_GPU, "gpus_per_replica": 4}, 4),
    ],
)
def test_a_replica_gets_the_gpus_of_its_model(args: dict[str, Any], gpus: float) -> None:
    assert read_args(args).gpus == gpus


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"num_replicas": "two"}, "--num-replicas: must be a whole number .* got 'two'"),
        ({"num_replicas": 3, "max_replicas": 2}, r"at least num_replicas \(3\), got 2"),
        ({"target_requests": 0}, "target_requests must be above 0, got 0"),
        ({"max_waiting_requests": -2}, "max_waiting_requests .* got -2"),
        ({"gpus_per_replica": 1.5}, "between 0 and 1, or a whole number, got 1.5"),
        ({**ON_GPU, "gpus_per_replica": 1}, "gpus_per_replica must be 4, .* got 1"),
        ({"routing": "sticky"}, "--routing: invalid choice: 'sticky'"),
        ({"num_replica": 2}, "unknown flag --num-replica: did you mean --num-replicas?"),
        ({"max_num_seq": 2}, "unknown flag --max-num-seq: did you mean --max-num-seqs?"),
        ({"port": 8000, "host": "::1"}, "host is nothing for paged.serve_app: .* http_options"),
        ({"api_server_count": 2}, "api_server_count is nothing .*: say num_replicas"),
        ({"data_parallel_size": 2}, "data_parallel_size is nothing .*: say num_replicas"),
        ({"api_keys_file": "keys.yaml"}, "api_keys_file is nothing .* each replica for itself"),
        ({"max_body_size": 0}, "--max-body-size must be at least 1, got 0"),
    ],
)
def test_mistakes_are_explained(args: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        paged.serve_app(args)


def test_the_policies_are_those_of_the_router() -> None:
    assert choices_of(get_type_hints(ReplicaOptions)["routing"]) == POLICIES
    assert ReplicaOptions().routing == POLICIES[0]


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "paged.http.replicas.deployments", raising=False)
    with pytest.raises(ConfigError, match=r"needs Ray Serve: pip install 'paged\[ray\]'"):
        paged.serve_app({})
