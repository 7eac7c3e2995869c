"""Every kind of result on a page: what it shows, what it makes of hostile contents."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmarks.report import KINDS
from tests.unit.tools.page_reader import Page
from tests.unit.tools.report_samples import sample
from vllm_mtp.tools.plan_report import ROOFLINE
from vllm_mtp.tools.report import make_sections
from vllm_mtp.tools.report_page import render_page
from vllm_mtp.tools.report_source import KEYS, DamagedError, Source

HOSTILE = "</svg></style><script>alert('x')</script><img src=x onerror=\"alert(1)\">&$"
TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "footer",
    "section", "div", "p", "h1", "h2", "h3", "ul", "li", "a", "span", "strong", "code",
    "figure", "figcaption", "table", "caption", "thead", "tbody", "tr", "th", "td",
    "dl", "dt", "dd", "details", "summary", "pre",
    "svg", "defs", "g", "path", "use", "clippath", "rect",
}  # fmt: skip
SAYS = {
    "eval": ["Acceptance of mimo-python", "with K = 3 a step brings", "position"],
    "compare": ["mimo-python: Worse: acceptance length, position 1.", "a.json"],
    "plan": ["On 8 x H200, MoE 671B: best K", "Assumed: a pass takes"],
    "doctor": ["Nothing stands in the way", "2.10 times as fast", "drafting ms"],
    "verify": ["Exact: the output is the target's", "chi-square", "804 of 1209"],
    "verify requests": ["Exact: none of 1767 requests differs", "async small cache"],
    "verify HTTP": ["Exact: 500 answers are those of no speculation", "accepted"],
    "soak": ["Sound: nothing held after", "rejected_slots"],
    "demo": ["of the speed without speculation 1.55", "1 of 72 continuations differ"],
    "grid": ["1.35 times as fast as no speculation", "1 of 3 targets reached"],
    "rollback": ["6 of 6 targets reached", "MB zeroed", "stated for an NVIDIA H200"],
    "steps": ["Of the step time of mtp K=3: 0.994 (mtp_plus)", "tokens/draft"],
    "crossing": ["1.63 (mtp K=3), 1.21 (mtp with a table), 1.63 (mtp_plus)"],
    "drafting": ["of the speed of vLLM's mtp: 1.18 (1 at a time)", "by position"],
    "host": ["beyond that of vLLM's mtp: +50 us (1 at a time)", "schedule"],
    "off": ["0.997 (1 at a time), 0.999 (16 at a time)", "ms a step"],
    "replay": ["29 worlds. 2 of 2 targets reached", "h200-70b-64-kinds", "oracle"],
    "held-out": ["200 worlds: in 19 of 20 goodput runs at least", "threshold"],
    "vocab build": ["1,024 of 16,384 tokens cover 97.09% of the 773,442"],
    "vocab compare": ["With 1024 learnt rows (auto) the acceptance length is 0.985"],
}
NUM_PICTURES = {"eval": 2, "grid": 3, "drafting": 2, "replay": 3} | dict.fromkeys(
    ("compare", "verify", "verify requests", "verify HTTP", "soak", "held-out"), 0
)
"""Of other kinds 1."""
STRANGER = {
    "eval": "mimo-python",
    "compare": "position 1",
    "plan": ROOFLINE,
    "doctor": "rollback by reference",
    "verify": "mtp_plus, random K",
    "verify requests": "structured_outputs",
    "verify HTTP": "completions.max_tokens",
    "soak": "num_cut",
    "demo": "a.py",
    "grid": "code c=1 T=0 short",
    "rollback": "mla",
    "steps": "mtp_plus scrub",
    "crossing": "mtp with a table",
    "drafting": "mtp_plus, full",
    "host": "16",
    "off": "16",
    "replay": "cpu-1-good",
    "held-out": "threshold",
    "vocab build": "0.32.0+cpu",
    "vocab compare": "code",
}
"""A text of each sample that somebody else could choose."""


@cache
def contents(kind: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return sample(kind, Path(folder))


def source(kind: str, content: Any) -> Source:
    return Source(Path(f"/results/{kind}.json"), f"{kind}.json", kind, content)


@cache
def page(kind: str) -> str:
    return render_page(make_sections([source(kind, contents(kind))], KINDS))


@pytest.mark.parametrize("kind", KEYS)
def test_a_page_says_what_was_found_and_where_it_comes_from(kind: str) -> None:
    read = Page(page(kind))
    assert not read.open
    for words in SAYS[kind]:
        assert words in read.text
    summary = " ".join(read.texts[read.texts.index("In short") :][:12])
    assert SAYS[kind][0].split(":")[0][:30] in " ".join(summary.split())
    assert read.values("role").count("img") == NUM_PICTURES.get(kind, 1)
    assert f"{kind}.json" in read.text
    if kind not in ("compare", "grid"):  # of made-up origin
        for words in ("command", "versions", "python 3."):
            assert words in read.text


@pytest.mark.parametrize("kind", KEYS)
def test_a_page_loads_nothing_and_its_parts_have_names(kind: str) -> None:
    read = Page(page(kind))
    assert read.tags <= TAGS
    assert not read.values("src")
    assert all(each.startswith("#") for each in read.values("href"))
    ids = read.values("id")
    assert len(ids) == len(set(ids))
    referred = [each.removeprefix("#") for each in read.values("href")]
    referred += read.values("aria-labelledby")
    assert set(referred) <= set(ids)
    assert "http://" not in read.text
    assert "https://" not in read.text
    num_tables = sum(tag == "table" for tag, _ in read.elements)
    num_captions = sum(tag == "caption" for tag, _ in read.elements)
    assert num_tables == num_captions > 0
    scopes = {attrs.get("scope") for tag, attrs in read.elements if tag == "th"}
    assert scopes == {"col", "row"}


@pytest.mark.parametrize("kind", KEYS)
def test_texts_of_strangers_are_shown_and_never_run(kind: str) -> None:
    written = json.dumps(contents(kind))
    stranger = json.dumps(STRANGER[kind])
    assert stranger in written
    hostile = json.loads(written.replace(stranger, json.dumps(HOSTILE)))
    read = Page(render_page(make_sections([source(kind, hostile)], KINDS)))
    assert not read.open
    assert read.tags <= TAGS, "no script, no img"
    assert not any(name.startswith("on") for _, a in read.elements for name in a)
    assert HOSTILE in " ".join(read.texts), "and nothing is swallowed"


def complaint(imitation: Source) -> str | None:
    """Why it cannot be shown; None if it can."""
    try:
        render_page(make_sections([imitation], KINDS))
    except DamagedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("value", [None, {}, [], "x", 0, 1e308, [None], {"a": None}])
def test_what_only_looks_like_a_result_is_one_sentence(kind: str, value: Any) -> None:
    imitation = source(kind, dict.fromkeys((*KEYS[kind], "options"), value))
    sentence = complaint(imitation)
    if sentence is None:
        assert value in (None, {}, [], 0), "nothing was measured, nothing is shown"
        return
    assert f"result: /results/{kind}.json is damaged or of" in sentence
    assert "must be what `vllm-mtp eval`" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("kind", ["eval", "off", "plan"])
def test_the_same_result_is_the_same_page(kind: str) -> None:
    again = render_page(make_sections([source(kind, contents(kind))], KINDS))
    assert again == page(kind)
