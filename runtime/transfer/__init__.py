"""Prompts that another engine computes: its KV pages are handed over while it works.

A decode engine asks a prefill engine for the full pages of a prompt that it lacks. The prefill
engine computes the prompt as it does any other, among its own, and after each step hands over the
pages that have become full, layer by layer. The decode engine keeps them in host memory under the
names that its prefix cache gives them, and queues the request when all are there: it then computes
what is left, the last tokens. Whatever goes wrong, it computes the rest itself.

`messages.py` is what the two say to each other, and `handshake.py` how they find that they hold the
same model. `landing.py` is the memory that pages arrive in, and the two ways into it: memory that
processes of one machine share, and the connection. On the decode side `asking.py` decides what is
asked of whom and `peer.py` is the connection; on the other side `serving.py` hands pages over, and
`door.py` is where decode engines connect.
"""
