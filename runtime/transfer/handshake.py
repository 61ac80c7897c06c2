"""How two engines find that they know the same key and write the same pages.

Each signs random bytes of the other with the key, which itself never crosses the network. It is
that of PAGED_TRANSFER_KEY, which both must have set to the same; without one, only processes of the
same machine are served.
"""

from __future__ import annotations

import hmac
import secrets
from importlib.metadata import version

from paged.prefix import page_hash, root_hash
from paged.runtime.fingerprint import fingerprint
from paged.runtime.greeting import MOST_AT_FIRST, Hello, NotAdmitted, Refused, Welcome
from paged.runtime.kept_files import source_digest
from paged.runtime.line import Line, proof
from paged.runtime.runner import StepRunner
from paged.runtime.transfer.messages import Introduction

KEY_VARIABLE = "PAGED_TRANSFER_KEY"
TIME_TO_ANSWER = 10.0
"""Seconds that a step of the handshake may take."""

_NO_GREETING = "it does not greet as a prefill server does at its --kv-transfer-port"


def facts_of(runner: StepRunner) -> dict[str, str]:
    """What must be the same in both engines, by name."""
    shapes = runner.shapes
    cache = shapes.cache
    groups = ", ".join(
        f"{len(each.layers)} layers with {f'a window of {each.window}' if each.window else 'none'}"
        for each in cache.groups
    )
    return {
        "the version of Paged": f"{version('paged')} ({source_digest()[:12]})",
        "--block-size": f"{cache.page_size}",
        "--kv-cache-dtype": cache.dtype.name,
        "the number of layers": f"{sum(home is not None for home in cache.homes)}",
        "the number of KV heads": f"{cache.num_kv_heads}",
        "the size of a head": f"{cache.head_dim}",
        "the windows of layers": groups or "none",
        "--tensor-parallel-size": f"{shapes.placement.num_devices}",
        "the hash of a page": page_hash(root_hash(), range(cache.page_size)).hex()[:12],
        "the fingerprint of the weights": fingerprint(runner.params, (shapes.model, cache.groups)),
    }


def admit(line: Line, facts: dict[str, str]) -> None:
    """The prefill engine's side.

    Raises:
        NotAdmitted: the other side is told why.
        EOFError, TimeoutError, ValueError, OSError: it does not speak like an engine.
    """
    nonce = secrets.token_bytes(32)
    line.send(Hello(nonce))
    asking = line.receive(within=TIME_TO_ANSWER, most=MOST_AT_FIRST)
    if not isinstance(asking, Introduction):
        raise NotAdmitted("it does not say who it is")
    reason = _obstacle(asking, nonce, facts)
    if reason is not None:
        line.send(Refused(reason))
        raise NotAdmitted(reason)
    line.send(Welcome(proof(KEY_VARIABLE, b"prefill", asking.nonce, nonce)))


def introduce(line: Line, facts: dict[str, str]) -> None:
    """The decode engine's side.

    Raises:
        NotAdmitted: the prefill engine refuses, or does not know the key.
        EOFError, TimeoutError, ValueError, OSError: it is gone, or is no engine.
    """
    try:
        hello = line.receive(within=TIME_TO_ANSWER, most=MOST_AT_FIRST)
    except (TimeoutError, ValueError) as error:
        raise ValueError(f"{_NO_GREETING} ({error})") from error
    if not isinstance(hello, Hello):
        raise ValueError(_NO_GREETING)
    nonce = secrets.token_bytes(32)
    line.send(Introduction(nonce, proof(KEY_VARIABLE, b"decode", hello.nonce, nonce), facts))
    answer = line.receive(within=TIME_TO_ANSWER, most=MOST_AT_FIRST)
    if isinstance(answer, Refused):
        raise NotAdmitted(answer.reason)
    expected = proof(KEY_VARIABLE, b"prefill", nonce, hello.nonce)
    if not (isinstance(answer, Welcome) and hmac.compare_digest(answer.proof, expected)):
        raise NotAdmitted(f"it has another {KEY_VARIABLE}")


def _obstacle(asking: Introduction, nonce: bytes, facts: dict[str, str]) -> str | None:
    """Why an engine's prompts cannot be computed here; None if they can."""
    if not hmac.compare_digest(asking.proof, proof(KEY_VARIABLE, b"decode", nonce, asking.nonce)):
        return f"{KEY_VARIABLE} differs: set it to the same on both"
    for name, value in facts.items():
        other = asking.facts.get(name, "not said")
        if other != value:
            return f"{name} is {other} on the decode engine and {value} on the prefill engine"
    return None
