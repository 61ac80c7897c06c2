"""Expositions of several processes as one."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paged.http.peers import added


def exposition(scale: float, status: str) -> str:
    registry = CollectorRegistry()
    Gauge("pages", "Of the engine.", registry=registry).set(scale)
    Gauge("process_start_time_seconds", "A time.", registry=registry).set(scale)
    Counter("requests", "Requests.", ["status"], registry=registry).labels(status).inc(scale)
    Histogram("seconds", "Times.", buckets=(1, 5), registry=registry).observe(scale)
    return generate_latest(registry).decode()


def test_what_adds_up_is_added_and_the_rest_is_of_the_one_that_was_asked() -> None:
    whole = added(exposition(2, "200"), [exposition(7, "200"), exposition(1, "404")], {"pages"})
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(whole.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert values == {
        ("pages",): 2,
        ("process_start_time_seconds",): 2,
        ("requests_total", "200"): 9,
        ("requests_total", "404"): 1,
        ("seconds_bucket", "1.0"): 1,
        ("seconds_bucket", "5.0"): 2,
        ("seconds_bucket", "+Inf"): 3,
        ("seconds_count",): 3,
        ("seconds_sum",): 10,
    }
