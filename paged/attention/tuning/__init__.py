"""Finding the fastest tilings of attention kernels on the GPU at hand, within a given time.

`workloads` says which steps count, `candidates` what is tried for them; `search` compiles all of
it, times what compiles and takes the best; `timer` is the GPU's side of that: arrays, programs and
its clock. `benchmarks/tune_attention.py` makes the table in `paged.attention.tuned` by it, and an
engine what is missing there (`paged.runtime.tuning`).
"""
