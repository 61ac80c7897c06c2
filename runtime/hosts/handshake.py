"""How rank 0 and another process find that they know the same key and run the same engine.

Each signs random bytes of the other with the key, so that neither a key nor anything that would do
in its place crosses the network. The key is that of PAGED_HOSTS_KEY, which all hosts must have set
to the same; without it the network is trusted, as `jax.distributed` and the exchanges of the
devices trust it in any case.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import asdict

from paged.models.loading import ModelSource
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.greeting import (
    MOST_AT_FIRST,
    Hello,
    NotAdmitted,
    Refused,
    Welcome,
    in_one_line,
)
from paged.runtime.hosts.messages import Join
from paged.runtime.line import Line, proof

KEY_VARIABLE = "PAGED_HOSTS_KEY"
TIME_TO_ANSWER = 10.0
"""Seconds that a step of the handshake may take."""

# What may differ: where a host keeps its files, and who it is.
_OWN = ("model", "tokenizer", "download_dir", "compile_cache_dir", "node_rank", "master_addr")


def facts_of(config: EngineConfig, source: ModelSource) -> dict[str, str]:
    """What must be the same in all processes of an engine, by name."""
    import jax

    from paged.runtime.kept_files import source_digest

    flags = {
        f"--{name.replace('_', '-')}": repr(value)
        for name, value in asdict(config).items()
        if name not in _OWN
    }
    software = f"{source_digest()} on JAX {jax.__version__}"
    model = hashlib.sha256(repr(source.config).encode()).hexdigest()
    return {"the version of Paged or JAX": software, "the model": model, **flags}


def admit(line: Line, facts: dict[str, str]) -> int:
    """Rank 0's side: the rank of whoever has connected.

    Raises:
        NotAdmitted: it is told why.
        EOFError, TimeoutError, ValueError, OSError: it does not speak like a process of ours.
    """
    nonce = secrets.token_bytes(32)
    line.send(Hello(nonce))
    join = line.receive(within=TIME_TO_ANSWER, most=MOST_AT_FIRST)
    if not isinstance(join, Join):
        raise NotAdmitted("it does not say who it is")
    reason = _obstacle(join, nonce, facts)
    if reason is not None:
        line.send(Refused(reason))
        raise NotAdmitted(f"rank {join.rank}: {reason}")
    line.send(Welcome(_proof("leader", join.nonce, nonce, join.rank)))
    return join.rank


def introduce(line: Line, rank: int, facts: dict[str, str]) -> None:
    """The other side.

    Raises:
        ConfigError: rank 0 refuses, or does not know the key.
        EOFError, TimeoutError, ValueError, OSError: it is gone, or is no process of ours.
    """
    hello, nonce = line.receive(within=TIME_TO_ANSWER, most=MOST_AT_FIRST), secrets.token_bytes(32)
    if not isinstance(hello, Hello):
        raise ValueError("no greeting")
    line.send(Join(rank, nonce, _proof("follower", hello.nonce, nonce, rank), facts))
    answer = line.receive(within=TIME_TO_ANSWER, most=MOST_AT_FIRST)
    if isinstance(answer, Refused):
        raise ConfigError(f"rank 0 refuses: {in_one_line(answer.reason)}")
    expected = _proof("leader", nonce, hello.nonce, rank)
    if not (isinstance(answer, Welcome) and hmac.compare_digest(answer.proof, expected)):
        raise ConfigError(f"whoever answers for rank 0 has another {KEY_VARIABLE}")


def _obstacle(join: Join, nonce: bytes, facts: dict[str, str]) -> str | None:
    """Why somebody is no part of this engine; None if it is."""
    expected = _proof("follower", nonce, join.nonce, join.rank)
    if not hmac.compare_digest(join.proof, expected):
        return f"{KEY_VARIABLE} is another one"
    for name, value in facts.items():
        if join.facts.get(name) != value:
            told = f" ({join.facts.get(name)}, and {value} on rank 0)" if name[0] == "-" else ""
            return f"{name} differs{told}: start all hosts with the same flags and versions"
    return None


def _proof(side: str, theirs: bytes, own: bytes, rank: int) -> bytes:
    """What only who knows the key can say to the other side's random bytes."""
    return proof(KEY_VARIABLE, side.encode(), theirs, own, str(rank).encode())
