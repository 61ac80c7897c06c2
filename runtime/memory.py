"""Where an engine's device memory goes, worked out before any of it is taken."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paged.runtime.errors import ConfigError

_GIB = 2**30
# A sequence is a token of a prompt and one of its answer at least.
_SHORTEST = 2


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, those of each device where several share a model.

    Attributes:
        budget: what the engine may use; None where only the pages are bounded (CPU).
        weights: parameters.
        state: per-slot state (page tables, sampler).
        steps: temporaries and outputs of compiled steps, as XLA reports them.
        bytes_per_page, page_size, num_pages: the pages, the null page included.
        max_model_len: longest sequence.
        pages_per_sequence: pages that one holds at its end, in all groups of layers.
        num_host_pages: pages in host memory.
        transit: for pages on their way from and to the host.
        weights_on_host: parameters in host memory, which are no part of `weights`.
        num_devices: that share the model. All have the same pages, of their own heads.
    """

    budget: int | None
    weights: int
    state: int
    steps: int
    bytes_per_page: int
    page_size: int
    num_pages: int
    max_model_len: int
    pages_per_sequence: int
    num_host_pages: int = 0
    transit: int = 0
    weights_on_host: int = 0
    num_devices: int = 1

    @property
    def bytes_per_host_page(self) -> int:
        """Of what all devices keep in a page."""
        return self.bytes_per_page * self.num_devices

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequences that fit in the pages at once.

        Of shorter ones fewer fit if layers have windows, which these do not outgrow.
        """
        return self._tokens_in(self.num_pages - 1)

    @property
    def num_host_tokens(self) -> int:
        """Tokens of the longest sequences that fit in host memory."""
        return self._tokens_in(self.num_host_pages)

    def _tokens_in(self, num_pages: int) -> int:
        tokens = self.page_size * -(-self.max_model_len // self.page_size)
        return num_pages * tokens // self.pages_per_sequence

    @property
    def num_full_sequences(self) -> float:
        """Sequences of max_model_len tokens that fit at once."""
        return (self.num_pages - 1) / self.pages_per_sequence

    def report(self) -> str:
        """Some lines for the start-up log."""
        pages = self.num_pages * self.bytes_per_page
        shares = {
            "budget": self.budget,
            "weights": self.weights,
            "slot state": self.state,
            "step memory": self.steps,  # not worked out without a budget
            "host transfers": self.transit,
        }
        of_each = f" of each of {self.num_devices} devices" if self.num_devices > 1 else ""
        lines = [
            f"Memory{of_each}:",
            *(f"  {name:14} {size_text(share)}" for name, share in shares.items() if share),
            f"  {'KV pages':14} {size_text(pages)}  ({self.num_pages} of {self.page_size} tokens)",
            f"GPU KV cache size: {self.num_tokens:,} tokens"
            if self.budget is not None
            else f"KV cache size: {self.num_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: "
            f"{self.num_full_sequences:.2f}x",
        ]
        if self.weights_on_host:
            lines.append(f"Weights in host memory: {size_text(self.weights_on_host)}")
        if self.num_host_pages:
            host = size_text(self.num_host_pages * self.bytes_per_host_page)
            lines.append(f"Host KV cache size: {self.num_host_tokens:,} tokens ({host})")
        return "\n".join(lines)


def page_memory(budget: int, weights: int, state: int, steps: int) -> int:
    """Bytes left for pages.

    Args:
        steps: what running steps takes, pages on their way from and to the host included.

    Raises:
        ConfigError: nothing is left; says by how much and which flags would help.
    """
    left = budget - weights - state - steps
    if left <= 0:
        raise ConfigError(
            f"No memory is left for KV pages: weights {size_text(weights)}, slot state "
            f"{size_text(state)} and step memory {size_text(steps)} exceed the budget of "
            f"{size_text(budget)} by {size_text(-left)}. Raise --gpu-memory-utilization, lower "
            "--max-num-seqs or --max-num-batched-tokens, or make weights smaller with "
            "--quantization or --tensor-parallel-size: see docs/failures.md#out-of-memory."
        )
    return left


def host_pages(wanted: int, bytes_per_page: int, available: int | None) -> int:
    """Pages that fit in the bytes of host memory that are wanted; none if those are 0.

    Args:
        available: see `available_memory`.

    Raises:
        ConfigError: it is more than there is, or less than a page.
    """
    if wanted and wanted < bytes_per_page:
        raise ConfigError(
            f"--kv-offloading-size is {size_text(wanted)}, and one KV page takes "
            f"{size_text(bytes_per_page)}. Give more, or 0 for none."
        )
    if available is not None and wanted > available:
        raise ConfigError(
            f"--kv-offloading-size is {size_text(wanted)}, and this machine has "
            f"{size_text(available)} of memory left. Use at most {available / _GIB:.2f}."
        )
    return wanted // bytes_per_page


def fit_model_len(
    wanted: int | None,
    model_len: int,
    num_pages: int,
    pages_of: Callable[[int], int],
    kv_bytes: int,
    bytes_per_page: int,
    *,
    from_share: bool,
) -> int:
    """The longest sequence the engine will serve.

    Args:
        wanted: --max-model-len, which passed `check_length`; None is the model's own length, -1 the
            longest that fits.
        model_len: what the model was made for.
        num_pages: pages, the null page included.
        pages_of: pages that a sequence of so many tokens holds at once.
        kv_bytes: bytes the pages may take.
        from_share: they are what --gpu-memory-utilization leaves, and not a number of their own.

    Raises:
        ConfigError: it does not fit; with the numbers, the largest length that would fit and the
            flags that would help.
    """
    fits = bisect_right(range(model_len + 1), num_pages - 1, key=pages_of) - 1
    if wanted == -1:
        wanted = fits
    length = model_len if wanted is None else wanted
    if length > fits or fits < _SHORTEST:
        length = max(length, _SHORTEST)
        needed = (pages_of(length) + 1) * bytes_per_page
        raise _too_long(length, fits, needed, kv_bytes, from_share=from_share)
    return length


def check_length(length: int, model_len: int) -> None:
    """Raises ConfigError for sequences that are longer than the model was made for."""
    if length > model_len:
        raise ConfigError(
            f"--max-model-len {length} is greater than the model's own length of {model_len} "
            f"(max_position_embeddings). Use at most {model_len}."
        )


def _too_long(
    length: int, fits: int, needed: int, kv_bytes: int, *, from_share: bool
) -> ConfigError:
    """Why sequences of a length cannot be served: the pages hold `fits` tokens of one."""
    shorter = f"Use --max-model-len {fits} or less, or give" if fits >= _SHORTEST else "Give"
    share = "--gpu-memory-utilization or " if from_share else ""
    return ConfigError(
        f"The model's max seq len ({length}) is larger than the maximum number of tokens that "
        f"can be stored in KV cache ({max(fits, 0)}): one such sequence needs "
        f"{size_text(needed)}, and {size_text(kv_bytes)} is there. {shorter} more memory with "
        f"{share}--kv-cache-memory-bytes {-(-needed // 2**20)}M: see "
        "docs/failures.md#kv-cache-too-small."
    )


def check_host_memory(plan: MemoryPlan, available: int | None) -> None:
    """Refuse what a CPU's memory cannot hold, before the system ends the process for it.

    Args:
        available: see `available_memory`.

    Raises:
        ConfigError: with the numbers.
    """
    # A CPU's devices are one, however many it is told to be.
    weights, state = plan.weights * plan.num_devices, plan.state * plan.num_devices
    weights += plan.weights_on_host
    num_pages = (plan.num_pages + plan.num_host_pages) * plan.num_devices
    pages = num_pages * plan.bytes_per_page
    if available is None or weights + state + pages <= available:
        return
    raise ConfigError(
        f"This machine has {size_text(available)} of memory left, and the model wants more: "
        f"weights {size_text(weights)}, slot state {size_text(state)}, KV pages "
        f"{size_text(pages)}. Lower --kv-cache-memory-bytes or --kv-offloading-size, or take a "
        "smaller model or --dtype."
    )


def available_memory(meminfo: Path = Path("/proc/meminfo"), *, swap: bool = True) -> int | None:
    """Bytes that this machine can still give out, swap included; None where it does not say.

    Args:
        swap: whether swap counts, which pinned memory cannot have.

    In a container this is the whole machine's, so that less than it may still be too much.
    """
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    if "MemAvailable" not in sizes:
        return None
    counted = ("MemAvailable", "SwapFree") if swap else ("MemAvailable",)
    return 1024 * sum(int(sizes[name][0]) for name in counted if name in sizes)


def size_text(num_bytes: int) -> str:
    """A number of bytes for people to read."""
    if num_bytes < _GIB:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / _GIB:.2f} GiB"
