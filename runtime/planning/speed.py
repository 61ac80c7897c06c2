"""How long steps take: the least that a GPU's data sheet allows, and what is to be expected.

Products, attention and what lies between follow each other; each takes as long as what it reads or
what it multiplies, whichever is longer. Of the data sheet's rates a GPU reaches a share, and each
layer costs some microseconds besides. These shares were read off an H200 (see docs/planning.md for
how well they fit); other GPUs are taken to reach the same ones, which nobody has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged.runtime.planning.gpus import Gpu
from paged.runtime.planning.work import Work

# Shares of the memory's bandwidth.
_READ = 0.85
_READ_PAGES_OF_8_BITS = 0.7
_READ_TO_UNPACK = 0.39
# Shares of the rate of dense products; of prefill's attention, half of it at so long a context.
_MULTIPLY = 0.68
_MULTIPLY_EXPERTS = 0.33
_ATTEND = 0.6
_HALF_ATTEND = 1500
# Shares of a link's bandwidth, and of the host's bus, of which one direction is used.
_LINK = 0.29
_BUS = 0.43
_ONE_WAY = 0.5
# Seconds of a layer beside its bytes: attention, norms and the like, activations put into 8 bits.
_ATTENTION = 10e-6
_BETWEEN = 13e-6
_TO_8_BITS = 24e-6
# Of a layer with experts: what chooses them and puts rows in order, and how long the host takes at
# least to launch it.
_ROUTING = 30e-6
_MIXTURE_LAUNCH = 220e-6
# Seconds of a sum over devices, of which each layer has two, and embeddings one.
_SUM = 28e-6
# How often what lies between products reads or writes the residual stream, in a layer.
_PASSES = 15
_HALF_PRECISION = 2  # bytes


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        floor: by the data sheet, for what must be read and multiplied.
        products, attention, rest: of what is expected; the rest has sums over devices in it.
    """

    floor: float
    products: float
    attention: float
    rest: float

    @property
    def expected(self) -> float:
        """All of it."""
        return self.products + self.attention + self.rest


class Speed:
    """The steps of a model on a GPU, or on several that share it.

    Args:
        kv_itemsize: bytes of a number in pages.
        on_host: bytes of weights that each step copies from the host.
    """

    def __init__(self, work: Work, gpu: Gpu, kv_itemsize: int, on_host: int = 0) -> None:
        self._work, self._gpu = work, gpu
        self._copies = on_host / (_BUS * gpu.bus)
        self._read_pages = _READ if kv_itemsize > 1 else _READ_PAGES_OF_8_BITS

    def decode(self, rows: int, context: float) -> StepTime:
        """A token for each of so many sequences, of which each sees `context` tokens."""
        read = rows * self._work.seen(context) * self._work.kv_bytes / self._gpu.bandwidth
        attention = read / self._read_pages + self._work.layers * _ATTENTION
        return self._step(rows, rows, read, attention)

    def prefill(self, tokens: int, start: int = 0, prompts: int = 1) -> StepTime:
        """A chunk of so many tokens after `start` others, or such a chunk of several prompts."""
        middle = start + tokens / 2
        pairs = prompts * tokens * self._work.seen(middle)
        least = pairs * self._work.pair_flop / self._gpu.flops16
        share = _ATTEND * middle / (middle + _HALF_ATTEND)
        attention = least / share + self._work.layers * _ATTENTION
        return self._step(prompts * tokens, prompts, least, attention)

    def prompt(self, tokens: int, chunk: int) -> float:
        """Seconds of a prompt that has the device to itself, in chunks of so many tokens."""
        starts = range(0, tokens, chunk)
        return sum(self.prefill(min(chunk, tokens - at), at).expected for at in starts)

    def prompts(self, tokens: int, chunk: int) -> float:
        """Seconds of each of many prompts, which share steps of so many tokens."""
        together = max(chunk // tokens, 1)
        if together == 1:
            return self.prompt(tokens, chunk)
        return self.prefill(tokens, prompts=together).expected / together

    def _step(self, tokens: int, rows: int, least: float, attention: float) -> StepTime:
        """A step with attention of so many seconds, and at least `least`."""
        work, gpu = self._work, self._gpu
        experts = work.expert_bytes_of(tokens)
        layers = work.layer_bytes + experts
        read = (layers + work.head_bytes) / gpu.bandwidth
        layer_flop, expert_flop = tokens * work.layer_flop, tokens * work.expert_flop
        head = rows * work.head_flop / gpu.flops16
        multiply = layer_flop / self._rate + head
        slow = _READ_TO_UNPACK if work.products == "unpacked" else _READ
        # What is expanded is written and read again.
        others = work.head_bytes + 2 * work.expanded_bytes
        products = max(
            layers / gpu.bandwidth / slow + others / gpu.bandwidth / _READ,
            (layer_flop - expert_flop) / self._rate / _MULTIPLY
            + expert_flop / self._rate / _MULTIPLY_EXPERTS
            + head / _MULTIPLY,
        )
        least_of_all = max(work.mixtures * _MIXTURE_LAUNCH, self._copies)
        return StepTime(
            floor=max(max(read, multiply) + least, self._copies * _BUS / _ONE_WAY),
            products=products,
            attention=attention,
            rest=max(self._rest(tokens), least_of_all - products - attention),
        )

    @property
    def _rate(self) -> float:
        """FLOP per second of products in layers."""
        rates = {"fp8": self._gpu.flops8, "int8": self._gpu.ints8}
        return rates.get(self._work.products) or self._gpu.flops16

    def _rest(self, tokens: int) -> float:
        """Seconds of what lies between products, and of sums over devices."""
        work = self._work
        stream = tokens * work.width * _HALF_PRECISION
        in_8_bits = work.products in ("fp8", "int8")
        layer = _BETWEEN + in_8_bits * _TO_8_BITS
        layer += _PASSES * stream / (_READ * self._gpu.bandwidth)
        sums = (2 * work.layers + 1) * (_SUM + stream / (_LINK * self._gpu.link))
        routing = work.mixtures * _ROUTING
        return work.layers * layer + routing + (sums if work.devices > 1 else 0.0)
