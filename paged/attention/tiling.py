"""How attention kernels cut and share out their work: all that can be chosen of them.

For each kernel a small record, and the rule that fills it where nothing was measured. What was
measured on a GPU are `Tilings`: those of `paged.attention.tuned`, or of a search at an engine's
first start (`paged.attention.tuning`). They reach the kernels with a step's metadata. No choice
changes a result beyond the order in which sums are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from paged.cache import Pages
from paged.kernels import up_to

Key = tuple[int, int, int, str]
"""What tilings are measured for: D, G, tokens of a page, and the pages' element type."""


@dataclass(frozen=True)
class Heads:
    """What is attended with, as far as tilings depend on it.

    Attributes:
        size: elements of a head (D).
        group: query heads that share one key/value head (G).
        page_size: tokens a page holds.
        dtype: of queries.
        page_dtype: what pages hold.
        latent_rank: elements of a value, in pages of latents; None for as many as a key has.
    """

    size: int
    group: int
    page_size: int
    dtype: jnp.dtype
    page_dtype: jnp.dtype
    latent_rank: int | None = None

    @classmethod
    def of(cls, q: jax.Array | jax.ShapeDtypeStruct, pages: Pages) -> Heads:
        """Of queries [.., Hq, D] over pages; both may be shapes alone."""
        heads, size = q.shape[-2:]
        page_size = pages.values.shape[1]
        return cls(
            size=size,
            group=heads // pages.kv_heads,
            page_size=page_size,
            dtype=jnp.dtype(q.dtype),
            page_dtype=pages.dtype,
            latent_rank=pages.latent_rank,
        )

    @property
    def key(self) -> Key:
        return self.size, self.group, self.page_size, self.page_dtype.name

    @property
    def product_dtype(self) -> jnp.dtype:
        """What keys and values are multiplied as on tensor cores: those of 8 bits in a type that
        has all of them."""
        if self.page_dtype.itemsize > 1:
            return self.dtype
        return jnp.dtype(jnp.bfloat16 if self.page_dtype == jnp.int8 else jnp.float16)

    @property
    def wide(self) -> bool:
        """Whether products are of float32: they take three of its parts, and four times the
        registers."""
        return self.dtype.itemsize > 2

    @property
    def rows(self) -> int:
        """Queries or positions that Triton's registers have room for at a time; tensor cores take
        no fewer than 16."""
        widest = pl.next_power_of_2(self.latent_rank or self.size)
        return max((2048 if self.wide else 16384) // widest, 16)


@dataclass(frozen=True)
class MosaicDecode:
    """Decode on Hopper.

    Attributes:
        residents: programs that a multiprocessor runs at a time.
        ring: bytes of the buffers of each. More bytes on their way at a time make memory slower
            (H200).
    """

    residents: int = 2
    ring: int = 65536

    @classmethod
    def default(cls, heads: Heads) -> MosaicDecode:
        """The same for all heads; of latents, shared memory holds one program's spans."""
        return cls() if heads.latent_rank is None else cls(residents=1)


@dataclass(frozen=True)
class MosaicPrefill:
    """Prefill on Hopper.

    Attributes:
        span: positions that a buffer of the ring holds.
        stages: buffers of the ring, for keys and for values.
        programs: for each multiprocessor, which runs one at a time. Several even out what they are
            given.
    """

    span: int
    stages: int = 2
    programs: int = 4

    @classmethod
    def default(cls, heads: Heads) -> MosaicPrefill:
        """As many positions as the ring and the registers have room for."""
        return cls(span=128 if heads.size <= 128 else 64)


@dataclass(frozen=True)
class TritonDecode:
    """Decode on other GPUs.

    Attributes:
        span: positions read at a time, a power of two.
        programs: that a batch is cut into if it has fewer rows; about four for each multiprocessor
            of a large GPU. Twice as many cost 3 to 15 % more to merge than they save (H200).
        warps: of a program.
        stages: spans on their way at a time.
    """

    span: int
    programs: int = 512
    warps: int = 4
    stages: int = 3

    @classmethod
    def default(cls, heads: Heads) -> TritonDecode:
        """Spans as large as they are fast without spilling registers."""
        warps = 8 if heads.size * heads.dtype.itemsize > 512 else 4
        return cls(span=min(heads.rows, 32 if heads.wide else 64), warps=warps)


@dataclass(frozen=True)
class TritonPrefill:
    """Prefill on other GPUs.

    Attributes:
        span: positions read at a time, a power of two.
        queries: rows (tokens times heads) of a piece, a power of two.
        programs: that share the pieces; about four for each multiprocessor of a large GPU, which
            evens out what they are given.
        warps: of a program.
        stages: spans on their way at a time.
    """

    span: int
    queries: int
    programs: int = 512
    warps: int = 8
    stages: int = 3

    @classmethod
    def default(cls, heads: Heads) -> TritonPrefill:
        """Pieces as large as they are fast without spilling registers.

        Values of 8 bits want some registers to be taken apart. Where heads of 16 bits are large,
        GPUs before Hopper lack shared memory or registers for more positions.
        """
        span = min(heads.rows, 32 if heads.wide else 64)
        large = heads.page_dtype.itemsize == 2 and heads.size > 64
        queries = min(heads.rows, 32 if heads.wide else 128)
        narrow = heads.page_dtype.itemsize == 1 and not heads.wide
        return cls(min(span, 32) if large else span, queries // 2 if narrow else queries)


DecodeTiling = MosaicDecode | TritonDecode
PrefillTiling = MosaicPrefill | TritonPrefill


@dataclass(frozen=True)
class Tilings:
    """What was measured to be fastest; nothing where nothing was.

    Attributes:
        decode: each for up to so many rows, in rising order; the last for more too.
        prefill: likewise, for tokens.
    """

    decode: tuple[tuple[int, DecodeTiling], ...] = ()
    prefill: tuple[tuple[int, PrefillTiling], ...] = ()

    def of_decode(self, rows: int) -> DecodeTiling | None:
        """For a step of so many rows."""
        return up_to(rows, self.decode) if self.decode else None

    def of_prefill(self, tokens: int) -> PrefillTiling | None:
        """For a step of so many tokens."""
        return up_to(tokens, self.prefill) if self.prefill else None


BY_RULE = Tilings()
"""Nothing was measured."""
