"""Whether pages in host memory are worth loading, or their tokens are sooner computed again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadCosts:
    """What was measured at the start, in seconds; by default loading costs nothing.

    Attributes:
        latency: of a load, however few its pages.
        per_page: of each page on top.
        per_token: of a token that is computed instead, in a full step. Attention to a long context
            comes on top of that, which is left out: what is loaded is worth it in any case.
    """

    latency: float = 0.0
    per_page: float = 0.0
    per_token: float = 1.0

    def are_worth(self, num_pages: int, num_tokens: int) -> bool:
        """Whether loading pages takes less time than computing the tokens they spare."""
        return self.latency + num_pages * self.per_page < num_tokens * self.per_token

    def report(self, bytes_per_page: int) -> str:
        """A line for the start-up log."""
        rate = bytes_per_page / self.per_page / 1e9 if self.per_page else float("inf")
        return (
            f"Pages in host memory load at {rate:.1f} GB/s after {self.latency * 1e3:.2f} ms; "
            f"{1 / self.per_token:,.0f} tokens/s are computed"
        )


def load_costs(one: float, many: float, num_pages: int, step: float, num_tokens: int) -> LoadCosts:
    """The costs that measurements tell of.

    Args:
        one, many: seconds that 1 and that `num_pages` pages (at least 2) took to load.
        step: seconds that a step of `num_tokens` tokens took to run.
    """
    per_page = max(many - one, 0.0) / (num_pages - 1)
    return LoadCosts(max(one - per_page, 0.0), per_page, step / num_tokens)


FREE = LoadCosts()
