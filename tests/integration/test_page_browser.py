"""The page in a browser: it shows text as text, by keys, light, dark and narrow."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import NAMES, Browser, browser, find_browser
from tests.support.page_server import (
    ANSWER,
    KEY,
    PROMPT,
    FakeEngine,
    change_of,
    page_app,
    rounds_of,
    serving,
)
from vllm_mtp.integration.observe.recent_requests import decoder_of, recent_requests
from vllm_mtp.page.document import document
from vllm_mtp.page.texts import with_texts

pytestmark = pytest.mark.skipif(
    find_browser() is None,
    reason=f"no browser: none of {', '.join(NAMES)} is installed",
)

ROUNDS = rounds_of(ANSWER)
WIDE, NARROW = (1200, 1500), (320, 640)
EXPECTED = {"1": "1.80", "2": "2.44", "3": "2.95", "4": "3.36"}
"""docs/metrics.md: tokens per round of p = 0.8 by K."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    assert program is not None
    with browser(program, tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    engine = FakeEngine(show_rounds=4)
    engine.step(change_of(0, "cmpl-<i>1</i>", ANSWER))
    return engine


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(page_app(engine)) as url:
        yield url


@pytest.fixture(params=["server", "file"])
def opened(
    request: pytest.FixtureRequest,
    tab: Browser,
    url: str,
    engine: FakeEngine,
    tmp_path: Path,
) -> Browser:
    """The page with the request, asked of a server or embedded in a file."""
    tab.errors.clear()
    tab.requested.clear()
    tab.show(*WIDE)
    if request.param == "server":
        tab.open(f"{url}/mtp_plus")
        enter_key(tab, KEY)
    else:
        file = tmp_path / "rounds.html"
        file.write_text(page_of(engine), encoding="utf-8")
        tab.open(file.as_uri())
    tab.wait("document.getElementById('request').length == 2")
    tab.wait("document.getElementById('draft').children.length == 1")
    return tab


def page_of(engine: FakeEngine) -> str:
    recent = recent_requests(engine)
    assert recent is not None
    (request,) = recent.newest_first().values()
    data = with_texts(request, decoder_of(engine))
    return document({"model": "m", "requests": [data]})


def enter_key(tab: Browser, key: str) -> None:
    tab.wait("!document.getElementById('key-form').hidden")
    tab.ask(f"document.getElementById('key').value = {key!r}")
    tab.ask("document.querySelector('#key-form button').click()")


def text_of(tab: Browser, element: str) -> str:
    text: str = tab.ask(f"document.getElementById({element!r}).textContent")
    return text


def kinds_of_round(tab: Browser) -> list[str]:
    script = "Array.from(document.querySelectorAll('#draft .token'), e => e.className)"
    return [each.removeprefix("token ") for each in tab.ask(script)]


def test_a_prompt_with_markup_and_emoji_is_shown_as_it_is(opened: Browser) -> None:
    opened.press("End")
    for lane in ("fast", "slow"):
        assert text_of(opened, lane).startswith(PROMPT)
    assert text_of(opened, "fast") == PROMPT + ANSWER
    assert opened.ask("document.title") == "mtp_plus, round by round"
    made = "document.querySelectorAll('main img, main i, main script').length"
    assert opened.ask(made) == 0
    label = opened.ask("document.getElementById('request').options[0].text")
    assert label.startswith("cmpl-<i>1</i>: ")
    errors = [each for each in opened.errors if "401" not in each]
    assert errors == []


def test_keys_step_through_rounds_and_each_is_drawn_as_it_was(opened: Browser) -> None:
    for number, (draft, num_accepted, _, _) in enumerate(ROUNDS, start=1):
        last = "plain"
        if draft:
            last = "bonus" if num_accepted == len(draft) else "recovered"
        kinds = ["accepted"] * num_accepted
        kinds += ["rejected"] * (len(draft) - num_accepted) + [last]
        assert kinds_of_round(opened) == kinds
        assert text_of(opened, "said").startswith(f"Round {number} of {len(ROUNDS)}: ")
        opened.press("ArrowRight")
    opened.press("ArrowLeft")
    assert text_of(opened, "said").startswith(f"Round {len(ROUNDS) - 1} of ")
    opened.press("Home")
    assert text_of(opened, "said").startswith("Round 1 of ")
    assert text_of(opened, "slow-caption") == "Autoregressive: 1 pass, 1 token"
    accepted = sum(each[1] for each in ROUNDS)
    drafted = sum(len(each[0]) for each in ROUNDS)
    assert f"{drafted} draft tokens, {accepted} accepted" in text_of(opened, "sums")


def test_the_closed_form_is_that_of_the_docs_and_the_simulation_near_it(
    opened: Browser,
) -> None:
    rows = opened.ask(
        "Array.from(document.querySelectorAll('#form-table tbody tr'), "
        "row => Array.from(row.cells, cell => cell.textContent))"
    )
    table = {k: (closed, simulated) for k, closed, simulated, _ in rows}
    for k, expected in EXPECTED.items():
        closed, simulated = table[k]
        assert closed == expected
        assert abs(float(simulated) - float(expected)) < 0.05
    opened.ask(
        "(() => { const k = document.getElementById('k'); k.value = 2;"
        "k.dispatchEvent(new Event('input')); const s = "
        "document.getElementById('request'); s.value = 'simulation';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert len(kinds_of_round(opened)) == 3
    mean = re.search(r"([\d.]+) a round", text_of(opened, "sums"))
    assert mean is not None
    assert 1.5 < float(mean[1]) <= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_overflows_and_everything_can_be_read(
    opened: Browser, scheme: str, size: tuple[int, int]
) -> None:
    opened.show(*size, scheme)
    opened.press("ArrowRight")
    opened.wait(f"document.querySelector('canvas').clientWidth < {size[0]}")
    assert opened.ask("document.documentElement.scrollWidth") <= size[0]
    ratios = opened.ask(CONTRASTS)
    assert len(ratios) > 5
    assert min(ratios.values()) >= 4.5, ratios


CONTRASTS = """(() => {
  const light = (text) => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const ground = (node) => {
    const own = getComputedStyle(node).backgroundColor;
    return own.endsWith(", 0)") ? ground(node.parentElement) : own;
  };
  const found = {};
  for (const node of document.querySelectorAll(
    "h1, #status, .legend .token, figcaption span, .prompt, th, button:enabled")) {
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
    found[node.className || node.tagName] =
      (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return found;
})()"""
"""Of texts to their grounds, as WCAG has it."""


def test_focus_is_seen_and_reaches_what_can_be_used(opened: Browser) -> None:
    reached = []
    for _ in range(9):
        opened.press("Tab")
        reached.append(opened.ask("document.activeElement.id"))
        width = opened.ask("getComputedStyle(document.activeElement).outlineWidth")
        assert width == "3px", reached
    assert {"request", "round", "next", "slow", "fast", "p", "k"} <= set(reached)


def test_only_the_server_is_asked_and_a_wrong_key_shows_nothing(
    tab: Browser, url: str
) -> None:
    tab.requested.clear()
    tab.open(f"{url}/mtp_plus")
    enter_key(tab, "wrong")
    tab.wait("document.getElementById('request-note').textContent.includes('refused')")
    assert tab.ask("document.getElementById('request').length") == 1, "the simulation"
    assert all(each.startswith(url) for each in tab.requested)


def test_charts_show_what_the_server_counted(
    tab: Browser, url: str, engine: FakeEngine
) -> None:
    tab.show(*WIDE)
    tab.open(f"{url}/mtp_plus")
    tab.wait("document.getElementById('status').textContent == 'live'")
    engine.step()
    tab.wait("document.getElementById('goodput-note').textContent != ''")
    assert text_of(tab, "acceptance-note") == "80 %, 60 %, 50 %, 30 %"
    assert text_of(tab, "length-note") == "3.2 in the mean"
    assert text_of(tab, "goodput-note") == "313 tokens/s in decode"
    assert text_of(tab, "time-note").startswith("target 60 %, verify 10 %, draft 20 %")
