"""One engine over several processes, on one host or many.

Every process loads its share of the model and compiles the same programs (`jax.distributed` makes
one machine of their devices). Rank 0 schedules, and tells the others each call of a program before
it makes it itself: which one, and what the host gives it. That is all they hear of, and nobody
answers: what they compute meets in the programs' own exchanges.

`handshake.py` is how two processes find that they belong together, `leader.py` what rank 0 does,
`follower.py` the process of another rank, and `headless.py` what keeps one running.
"""
