"""Models that answer a text with a vector or a score, not with more text.

Nothing is kept from one step to the next, so there is no scheduler and there are no pages: texts
wait (`waiting.py`), are computed by the grid (`grid.py`, `runner.py`), and are done (`worker.py`).
"""
