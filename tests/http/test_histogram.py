"""A value counts in every bucket that it does not exceed."""

from paged.http.histogram import Histogram


def test_buckets_are_cumulative_and_hold_their_bound() -> None:
    histogram = Histogram("seconds", "Seconds.", {"model": "m"}, [0.1, 1, 10])
    for value in (0.05, 0.1, 0.5, 10.0, 11.0):
        histogram.observe(value)
    (family,) = histogram.collect()
    samples = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert samples == {
        ("seconds_bucket", "0.1"): 2,
        ("seconds_bucket", "1.0"): 3,
        ("seconds_bucket", "10.0"): 4,
        ("seconds_bucket", "+Inf"): 5,
        ("seconds_count", None): 5,
        ("seconds_sum", None): 21.65,
    }
    assert {sample.labels["model"] for sample in family.samples} == {"m"}
