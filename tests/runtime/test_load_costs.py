"""When pages in host memory are loaded, and when their tokens are computed again."""

import pytest

from paged.runtime.load_costs import LoadCosts, load_costs


def test_a_load_must_take_less_time_than_the_tokens_it_spares() -> None:
    costs = LoadCosts(latency=10.0, per_page=2.0, per_token=1.0)
    assert not costs.are_worth(num_pages=3, num_tokens=16)
    assert costs.are_worth(num_pages=3, num_tokens=17)
    assert not costs.are_worth(num_pages=0, num_tokens=0)


def test_loads_that_cost_nothing_are_worth_any_token() -> None:
    assert LoadCosts().are_worth(1000, 1)
    assert not LoadCosts().are_worth(1000, 0)


def test_costs_follow_from_measurements() -> None:
    costs = load_costs(one=3.0, many=10.0, num_pages=8, step=6.0, num_tokens=12)
    assert costs == LoadCosts(latency=2.0, per_page=1.0, per_token=0.5)
    assert costs.latency + 8 * costs.per_page == 10.0


@pytest.mark.parametrize(("one", "many"), [(2.0, 1.0), (0.5, 8.0)])
def test_measurements_that_scatter_make_no_negative_costs(one: float, many: float) -> None:
    costs = load_costs(one, many, num_pages=4, step=1.0, num_tokens=1)
    assert min(costs.latency, costs.per_page) >= 0
