"""The process of an engine for vectors and scores: the device, at the other end of a socket.

    python -m paged.runtime.pooling.process FD

`paged.runtime.pooling.remote` starts it, as `paged.runtime.engine_process` says of text.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from paged.runtime.engine import find_model
from paged.runtime.engine_process import serve_model
from paged.runtime.pooling.grid import Shape
from paged.runtime.wire import Channel, Compute, Computed, PoolingReady, Start, ToPooling

if TYPE_CHECKING:
    from paged.runtime.pooling.runner import Launched, PoolingRunner
    from paged.runtime.pooling.setup import Ready


def serve(ready: Ready[PoolingRunner], channel: Channel) -> None:
    """Compute batches until the other side closes, each launched before the last one is read."""
    channel.send(PoolingReady(ready.grid, ready.abilities, ready.max_model_len, ready.lowercase))
    launched: deque[Launched] = deque()
    while True:
        try:
            messages = channel.receive(wait=not launched)
        except EOFError:
            ready.runner.close()
            return
        launched.extend(_launch(ready.runner, message) for message in messages)
        if launched:
            vectors = launched.popleft().read()
            channel.send(Computed(vectors.shape[1], vectors.tobytes(), ready.runner.num_compiles))


def _launch(runner: PoolingRunner, message: Compute) -> Launched:
    shape = Shape(message.rows, message.length)
    return runner.launch_packed(
        shape, np.frombuffer(message.packed, np.int32).reshape(shape.rows, -1)
    )


def _load(start: Start) -> Ready[PoolingRunner]:
    # Here, so that the watcher runs before the seconds that importing JAX takes.
    from paged.runtime.pooling.setup import prepare_pooling

    ready = prepare_pooling(start.config, find_model(start.config))
    gc.freeze()  # what start-up made lives as long as this process
    return ready


if __name__ == "__main__":
    sys.exit(serve_model(int(sys.argv[1]), _load, serve, ToPooling))
