"""The status page in a real browser: what it shows, with keys and below a path, wide and narrow."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from paged.http.app import create_app, create_server, create_service
from tests.browser.chromium import PROGRAM, Page, browser
from tests.http.fakes import FakeEngine, serving

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium"),
]
OPEN = "!document.querySelector('#board').hidden"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """A page that complains of nothing but a missing key."""
    chromium.look(1280, 900)
    chromium.messages.clear()
    yield chromium
    chromium.open("about:blank")
    assert [each for each in chromium.messages if "401" not in each] == []


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(create_app(engine, ["tiny"])) as address:
        yield address


def test_what_it_shows(page: Page, url: str, engine: FakeEngine) -> None:
    engine.running = {f"cmpl-{number}" for number in range(20)}
    engine.num_waiting = 4
    page.open(f"{url}/")
    page.until(OPEN)
    assert page.text("#model") == "tiny"
    assert page.text("#state") == "serving"
    assert [page.text(f"#{name}") for name in ("running", "waiting", "usage", "hits")] == [
        *("20", "4", "25 %", "75 %")
    ]
    legend = page.text("#pages-legend").split()
    assert legend == ["used", "10", "shared", "5", "cached", "10", "free", "75"]
    assert page.text("#sequences").splitlines()[-1] == "and 14 more"
    assert "weights 2.00 GiB" in page.text("#memory-legend")
    assert "Start: weights 1.5 s, compile 20.0 s." in page.text("#startup")
    assert page.run("document.title") == "20 running · Paged"


def test_pages_have_the_colours_of_the_legend(page: Page, url: str) -> None:
    page.open(f"{url}/")
    page.until(OPEN)
    for name, square in (("used", 0), ("shared", 12), ("cached", 20), ("free", 60)):
        assert page.run(f"({_COLOUR_OF_SQUARE})({square})") == page.run(
            f"({_COLOUR_OF_LEGEND})('{name}')"
        )


# The middle of a square: squares of 26 pixels, as few as there are.
_COLOUR_OF_SQUARE = """square => {
  const canvas = document.querySelector('#pages');
  const columns = Math.floor(canvas.clientWidth / 26);
  const at = [square % columns, Math.floor(square / columns)].map(i => i * 26 + 11);
  return [...canvas.getContext('2d').getImageData(...at, 1, 1).data].slice(0, 3).join(', ');
}"""
_COLOUR_OF_LEGEND = """name => {
  const entry = document.querySelector(`#pages-legend .${name}`);
  return getComputedStyle(entry, '::before').backgroundColor.match(/\\d+/g).join(', ');
}"""


def test_it_follows_what_happens(page: Page, url: str, engine: FakeEngine) -> None:
    page.open(f"{url}/")
    page.until(OPEN)
    assert page.text("#running") == "0"
    engine.running = {"cmpl-1"}
    page.until("document.querySelector('#running').innerText === '1'")
    engine.errored = True
    page.until("document.querySelector('#state').innerText.startsWith('the engine has stopped')")


def test_a_server_that_does_not_answer(page: Page, engine: FakeEngine) -> None:
    is_hung = asyncio.Event()
    app = create_app(engine, ["tiny"])

    async def hangs(scope: Scope, receive: Receive, send: Send) -> None:
        if is_hung.is_set() and scope["path"] == "/status.json":
            await asyncio.sleep(10)
        await app(scope, receive, send)

    with serving(Starlette(routes=[Mount("/", hangs)])) as url:
        page.open(f"{url}/")
        page.until(OPEN)
        is_hung.set()
        page.until("document.querySelector('#state').innerText.startsWith('no answer')")
        page.open("about:blank")


def test_talking_to_the_model(page: Page, url: str, engine: FakeEngine) -> None:
    engine.answer = "<b>Hello</b> there!"
    engine.pause = 0.01
    page.open(f"{url}/")
    page.until(OPEN)
    page.type("#chat-text", "Hi")
    page.press_enter()
    page.until("document.querySelector('#chat-log .note')")
    log = page.text("#chat-log")
    assert log.startswith("Hi\n<b>Hello</b> there!\n19 tokens, ")
    assert engine.seen[0].text == "user:Hi|assistant:"
    page.type("#chat-text", "And you?")
    page.press_enter()
    page.until("document.querySelectorAll('#chat-log .note').length === 2")
    assert engine.seen[1].text.startswith("user:Hi|assistant:<b>Hello</b> there!|user:And you?|")
    assert page.text("#tokens-now").isdigit()
    page.run("document.querySelector('#chat-new').click()")
    assert page.text("#chat-log") == ""


def test_an_answer_can_be_stopped(page: Page, url: str, engine: FakeEngine) -> None:
    engine.answer, engine.pause = "x" * 40, 0.1
    page.open(f"{url}/")
    page.until(OPEN)
    page.type("#chat-text", "Hi")
    page.run("document.querySelector('#chat-send').click()")
    page.until("document.querySelector('#chat-log .model')")
    assert page.text("#chat-send") == "Stop"
    page.run("document.querySelector('#chat-send').click()")
    page.until("document.querySelector('#chat-send').innerText === 'Send'")
    page.until("document.querySelector('#running').innerText === '0'")
    assert len(engine.aborted) == 1


def test_what_is_refused_is_said(page: Page, url: str) -> None:
    page.open(f"{url}/")
    page.until(OPEN)
    page.type("#chat-text", "long " * 50)
    page.press_enter()
    page.until("document.querySelector('#chat-log .error')")
    assert "a prompt of" in page.text("#chat-log .error")
    page.messages.clear()  # the browser tells of the status


def test_a_server_with_keys(page: Page, engine: FakeEngine) -> None:
    with serving(create_app(engine, ["tiny"], api_keys=["secret"])) as url:
        page.open(f"{url}/")
        page.until("!document.querySelector('#door').hidden")
        assert page.run(OPEN) is False
        page.type("#key", "no key: ключ")
        page.press_enter()
        page.until("document.querySelector('#door-error').innerText !== ''")
        assert page.text("#door-error") == "That is no key: no header can carry it."
        page.run("document.querySelector('#key').value = ''")
        page.run("document.querySelector('#door-error').innerText = ''")
        page.type("#key", "wrong")
        page.press_enter()
        page.until("document.querySelector('#door-error').innerText !== ''")
        page.run("document.querySelector('#key').value = ''")
        page.type("#key", "secret")
        page.press_enter()
        page.until(OPEN)
        page.type("#chat-text", "Hi")
        page.press_enter()
        page.until("document.querySelector('#chat-log .note')")
        page.until("document.querySelector('nav a[href=docs]').hidden")
        assert page.run("document.querySelector('nav a[href=metrics]').hidden") is False
        page.open(f"{url}/")
        page.until(OPEN)
        page.until("document.querySelector('nav a[href=docs]').hidden")


def test_a_proxy_that_refuses_in_its_own_words(page: Page, engine: FakeEngine) -> None:
    app = create_app(engine, ["tiny"])

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].endswith("/chat/completions"):
            await HTMLResponse("<h1>Bad Gateway</h1>", 502)(scope, receive, send)
        else:
            await app(scope, receive, send)

    with serving(Starlette(routes=[Mount("/", proxy)])) as url:
        page.open(f"{url}/")
        page.until(OPEN)
        page.type("#chat-text", "Hi")
        page.press_enter()
        page.until("document.querySelector('#chat-log .error')")
        assert page.text("#chat-log .error") == "Status 502, and not in the server's own words."
        page.messages.clear()  # the browser tells of the status


def test_below_a_path(page: Page, engine: FakeEngine) -> None:
    app = create_app(engine, ["tiny"])
    with serving(Starlette(routes=[Mount("/models", app)])) as url:
        page.open(f"{url}/models/")
        page.until(OPEN)
        page.type("#chat-text", "Hi")
        page.press_enter()
        page.until("document.querySelector('#chat-log .note')")


def test_several_models(page: Page) -> None:
    engines = {"first": FakeEngine(answer="One"), "second": FakeEngine(answer="Two")}
    engines["second"].running = {"cmpl-1"}
    services = [
        create_service(engine, [name], number)
        for number, (name, engine) in enumerate(engines.items())
    ]
    with serving(create_server(services)) as url:
        page.open(f"{url}/")
        page.until(OPEN)
        assert page.text("#running") == "0"
        page.run("models.value = 'second', models.dispatchEvent(new Event('change')), undefined")
        page.until("document.querySelector('#running').innerText === '1'")
        page.type("#chat-text", "Hi")
        page.press_enter()
        page.until("document.querySelector('#chat-log .note')")
        assert page.text("#chat-log .model") == "Two"


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_every_width(page: Page, url: str, engine: FakeEngine, width: int) -> None:
    engine.running = {f"chatcmpl-{number:032}-0" for number in range(30)}
    page.look(width, 800)
    page.open(f"{url}/")
    page.until(OPEN)
    assert page.run("document.documentElement.scrollWidth") == width


def test_light_and_dark(page: Page, url: str, tmp_path: Path) -> None:
    page.open(f"{url}/")
    page.until(OPEN)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.shoot(tmp_path / "light.png")
    page.look(1280, 900, "dark")
    assert page.run(ground) != light
    page.shoot(tmp_path / "dark.png")
    pictures = [path.read_bytes() for path in (tmp_path / "light.png", tmp_path / "dark.png")]
    assert pictures[0] != pictures[1]
