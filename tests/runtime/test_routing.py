"""The router against the rules it is to keep, over random fleets and families of prompts."""

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged.prefix import extend_hashes
from paged.runtime.routing import POLICIES, Overload, Policy, Router

PAGE = 4
NAMES = ("a", "b", "c", "d")


def chain(tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, PAGE)
    return hashes


def fleet(policy: Policy = "prefix", num_replicas: int = 3, num_pages: int = 100) -> Router:
    router = Router(policy)
    for name in NAMES[:num_replicas]:
        router.add(name, num_pages)
    return router


def send(router: Router, tokens: list[int]) -> str:
    hashes = chain(tokens)
    replica = router.choose(hashes)
    router.sent(hashes, replica)
    return replica


def test_what_begins_alike_goes_where_its_beginning_went() -> None:
    router = fleet()
    system = [0] * 8
    homes = {user: send(router, system + [user] * 8) for user in range(3)}
    assert homes == {0: "a", 1: "a", 2: "a"}  # the system prompt is there, and room
    assert send(router, [9] * 8) == "b"
    assert send(router, [9] * 8 + [1] * 40) == "b"


def test_of_those_with_equally_much_the_least_loaded() -> None:
    router = fleet()
    for replica in ("a", "b"):
        router.sent(chain([0] * 8), replica)
    router.sent([], "a")
    assert router.choose(chain([0] * 12)) == "b"


def test_an_overloaded_replica_is_passed_over_for_who_has_less() -> None:
    router = fleet()
    whole, part = [0] * 8 + [1] * 8, [0] * 8
    router.sent(chain(whole), "a")
    router.sent(chain(part), "b")
    assert router.choose(chain(whole)) == "a"
    router.report("a", 50)
    assert router.choose(chain(whole)) == "b"
    router.report("b", 50)
    assert router.choose(chain(whole)) == "c"


def test_a_prefix_that_all_want_spreads_over_all() -> None:
    router = fleet(num_replicas=4)
    counts = Counter(send(router, [0] * 64) for _ in range(400))
    bound = Overload().bound(100) + 1
    assert len(counts) == 4
    assert max(counts.values()) <= bound


def test_least_loaded_takes_turns_among_equals() -> None:
    router = fleet("least_loaded")
    assert [send(router, [0] * 8) for _ in range(6)] == ["a", "b", "c"] * 2
    router.ended("c")
    assert send(router, [0] * 8) == "c"


def test_random_is_seeded_and_even() -> None:
    runs = [[send(router, []) for _ in range(900)] for router in (fleet("random"), fleet("random"))]
    assert runs[0] == runs[1]
    assert min(Counter(runs[0]).values()) > 250


def test_what_a_full_replica_was_sent_long_ago_is_forgotten() -> None:
    router = fleet(num_pages=4)
    router.sent(chain([1] * 16), "b")
    router.sent(chain([2] * 8), "b")
    router.report("b", 1)
    assert router.choose(chain([2] * 8)) == "b"
    assert router.choose(chain([1] * 8)) == "b"  # of this chain the first two pages remain
    router.sent(chain([3] * 8), "b")
    assert router.choose(chain([1] * 8)) == "a"


def test_a_removed_replica_comes_back_with_nothing() -> None:
    router = fleet()
    router.sent(chain([1] * 8), "b")
    router.remove("b")
    router.ended("b")
    assert router.choose(chain([1] * 8)) == "a"
    router.add("b", 10)
    router.sent([], "a")
    assert router.choose(chain([1] * 8)) != "a"
    assert router.num_open("b") == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_only_those_asked_for_are_chosen(policy: Policy) -> None:
    router = fleet(policy)
    router.sent(chain([1] * 8), "a")
    assert router.choose(chain([1] * 8), among=["c", "unknown"]) == "c"
    with pytest.raises(ValueError, match="no replica may be sent requests"):
        router.choose([], among=[])


def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="prefix, least_loaded, random, got 'best'"):
        Router("best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="share of at least 1"):
        Overload(share=0.5)
    router = fleet()
    with pytest.raises(ValueError, match="'a' is there already"):
        router.add("a", 1)
    with pytest.raises(ValueError, match="at least 1 page, got 0"):
        router.add("z", 0)


class Fleet(RuleBasedStateMachine):
    """The router beside lists that are looked through from end to end."""

    @initialize(policy=st.sampled_from(POLICIES), capacity=st.integers(1, 12))
    def begin(self, policy: Policy, capacity: int) -> None:
        self.router = Router(policy, Overload(share=1.0, spare=2.0))
        self.capacity = capacity
        self.open: dict[str, int] = {}
        self.sent: dict[str, list[bytes]] = {}  # what it remembers, the newest last

    @rule(name=st.sampled_from(NAMES))
    def add_or_remove(self, name: str) -> None:
        if name in self.open:
            self.router.remove(name)
            del self.open[name], self.sent[name]
        else:
            self.router.add(name, self.capacity)
            self.open[name], self.sent[name] = 0, []

    @precondition(lambda self: self.open)
    @rule(seed=st.integers(0, 40), among=st.sets(st.sampled_from(NAMES)) | st.none())
    def request(self, seed: int, among: set[str] | None) -> None:
        random = Random(seed)  # few prompts of few tokens: many begin alike
        hashes = chain([random.randrange(2) for _ in range(PAGE * random.randrange(6))])
        candidates = self.open.keys() if among is None else self.open.keys() & among
        if not candidates:
            return
        replica = self.router.choose(hashes, among)
        assert replica in candidates
        if self.router.policy == "prefix":
            self.check_prefix(hashes, replica, set(candidates))
        elif self.router.policy == "least_loaded":
            assert self.open[replica] == min(self.open[each] for each in candidates)
        self.router.sent(hashes, replica)
        self.open[replica] += 1
        kept = [page for page in self.sent[replica] if page not in hashes[: self.capacity]]
        self.sent[replica] = (kept + hashes[: self.capacity][::-1])[-self.capacity :]

    def check_prefix(self, hashes: list[bytes], replica: str, candidates: set[str]) -> None:
        bound = sum(self.open.values()) / len(self.open) + 2.0
        depth = {each: sum(page in self.sent[each] for page in hashes) for each in candidates}
        free = [each for each in candidates if self.open[each] < bound and depth[each]]
        if not free:
            assert self.open[replica] == min(self.open[each] for each in candidates)
            return
        deepest = max(depth[each] for each in free)
        best = [each for each in free if depth[each] == deepest]
        assert replica in best
        assert self.open[replica] == min(self.open[each] for each in best)

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0), count=st.integers(0, 9) | st.none())
    def end_or_report(self, pick: int, count: int | None) -> None:
        name = sorted(self.open)[pick % len(self.open)]
        if count is None:
            self.router.ended(name)
            self.open[name] = max(self.open[name] - 1, 0)
        else:
            self.router.report(name, count)
            self.open[name] = count

    @invariant()
    def it_counts_right(self) -> None:
        assert set(self.router.replicas) == self.open.keys()
        assert {each: self.router.num_open(each) for each in self.open} == self.open


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
