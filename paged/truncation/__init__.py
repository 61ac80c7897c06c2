"""How far down a row's logits tokens may be drawn: top-k, top-p and min-p as one threshold.

All three filters keep the most likely tokens, so that what they keep together is every logit of at
least some value. `truncation_thresholds` finds it: on a GPU by kernels that read the logits once
and then only what may hold the threshold, elsewhere by plain XLA.
"""

from __future__ import annotations

import jax
from jax import lax

from paged.truncation.reference import thresholds_reference
from paged.truncation.triton import thresholds_triton


def truncation_thresholds(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """A value [R] float32 for each row: the logits that reach it are kept, the others dropped.

    Kept is what min-p leaves, of that what top-k leaves, and of that what top-p leaves; the most
    likely token always, and with any logit all that equal it, be they more than k. A row's
    threshold depends on the row alone, to the last bit.

    Args:
        logits: [R, V] float32.
        temperature: [R] float32 above 0, of the probabilities that top-p and min-p speak of.
        top_k: [R] int32, at least 1; V or more keeps all.
        top_p: [R] float32 above 0; 1 keeps all.
        min_p: [R] float32 from 0 (keeps all) to 1.
    """
    return lax.platform_dependent(
        *(logits, temperature, top_k, top_p, min_p),
        cuda=thresholds_triton,
        default=thresholds_reference,
    )
