"""The page of ``vllm-mtp report`` in a browser, wide and narrow, light and dark.

Debian's chromium, without a window. The page runs no script, so another one that holds
it in a frame of the wished size looks at it, and chromium prints what that one found.
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks.report import KINDS
from tests.unit.tools.report_samples import COMMITTED, evaluation, write_sample
from vllm_mtp.tools.report import run_report

CHROMIUM = shutil.which("chromium")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
WIDE, NARROW = 1280, 390
HEIGHT = 1600
HOSTILE = "<script>top.document.title = 'taken'</script><img src=x onerror='x'>"

OBSERVER = """
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const texts = (name) => [...page.querySelectorAll(name)].map((e) => e.textContent);
  const width = page.documentElement.clientWidth;
  const inside = (e) => e.closest(".scroll, pre") !== null;
  const found = {
    width,
    scrollWidth: page.documentElement.scrollWidth,
    headings: texts("h2"),
    captions: texts("caption"),
    stickingOut: [...page.querySelectorAll("body *")]
      .filter((e) => !inside(e) && e.getBoundingClientRect().right > width)
      .map((e) => e.outerHTML.slice(0, 80)),
    plots: [...page.querySelectorAll("svg.plot")].map((e) => {
      const shown = e.getBoundingClientRect(), drawn = e.getBBox();
      const box = e.viewBox.baseVal;
      return {
        shown: [shown.width, shown.height],
        natural: [box.width, box.height],
        drawn: [drawn.width, drawn.height],
        lost: [...e.querySelectorAll("use")]
          .filter((u) => !page.querySelector(u.getAttribute("href"))).length,
        ink: getComputedStyle(e).fill,
      };
    }),
    ink: getComputedStyle(page.body).color,
    scripts: page.querySelectorAll("script, img, [onerror]").length,
    title: document.title,
  };
  document.querySelector("pre").textContent = JSON.stringify(found);
};
"""


@pytest.fixture(autouse=True, scope="module")
def browser() -> str:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    return CHROMIUM


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two evaluations and of one result of each other kind."""
    folder = tmp_path_factory.mktemp("page")
    # Not of all that is in docs/results: a new result there changes no test.
    files = [*COMMITTED.values()]
    for name, seed in (("base", 0), ("new", 1)):
        files.append(folder / f"{name}.json")
        files[-1].write_text(evaluation(seed).model_dump_json())
    files += [
        write_sample(kind, folder) for kind in ("plan", "doctor", "grid", "drafting")
    ]
    return run_report(files, folder / "report.html", KINDS)


def chromium(tmp_path: Path, address: Path, *options: str) -> str:
    """What chromium prints."""
    assert CHROMIUM is not None
    # A new profile each time: nothing is left from another run.
    profile = tmp_path / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", *options]
    done = subprocess.run(
        [*command, address.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def observed(tmp_path: Path, page: Path, width: int, *options: str) -> dict[str, Any]:
    """What a script sees of a page in a frame of a width."""
    content = html.escape(page.read_text(encoding="utf-8"), quote=True)
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(
        f'<!doctype html><title>untouched</title><body style="margin:0"><iframe '
        f'style="border:0" width={width} height={HEIGHT} srcdoc="{content}"></iframe>'
        f"<pre></pre><script>{OBSERVER}</script>",
        encoding="utf-8",
    )
    printed = chromium(tmp_path, wrapper, "--dump-dom", *options)
    found = re.search(r"<pre>(\{.*?\})</pre>", printed, re.DOTALL)
    assert found, printed[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert seen["width"] == width
    return seen


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_all_of_it_is_there_and_nothing_sticks_out(
    width: int, page: Path, tmp_path: Path
) -> None:
    seen = observed(tmp_path, page, width)
    headings = [
        "In short",
        "Crossing a threshold",
        "Off",
        "Controller",
        "Step time",
        "Rollback kernels",
        "Acceptance of mimo-python",
        "Plan",
        "Doctor",
    ]
    assert set(headings) <= set(seen["headings"])
    assert "new.json against base.json" in seen["captions"]
    assert seen["scrollWidth"] == width
    assert seen["stickingOut"] == []
    assert len(seen["plots"]) >= 15
    for plot in seen["plots"]:
        assert plot["lost"] == 0
        shown, natural, drawn = (plot[key] for key in ("shown", "natural", "drawn"))
        assert shown[0] / shown[1] == pytest.approx(natural[0] / natural[1], rel=0.02)
        # Large enough to be read, and filled.
        assert shown[0] >= 0.6 * natural[0] * 4 / 3
        assert drawn[0] > 0.8 * natural[0]
        assert drawn[1] > 0.5 * natural[1]


def test_figures_follow_the_page_into_the_dark(page: Path, tmp_path: Path) -> None:
    light = observed(tmp_path, page, WIDE)
    dark = observed(tmp_path, page, WIDE, "--force-dark-mode")
    assert light["ink"] != dark["ink"]
    for seen in (light, dark):
        assert {plot["ink"] for plot in seen["plots"]} == {seen["ink"]}


def test_texts_of_strangers_do_nothing(tmp_path: Path) -> None:
    source = tmp_path / "eval.json"
    hostile = evaluation(0, model=HOSTILE, categories=("code", HOSTILE))
    source.write_text(hostile.model_dump_json())
    seen = observed(tmp_path, run_report([source], tmp_path / "r.html"), NARROW)
    assert seen["headings"][1] == f"Acceptance of {HOSTILE}"
    assert seen["scripts"] == 0
    assert seen["title"] == "untouched"
    assert seen["scrollWidth"] == NARROW


def test_a_picture_of_the_page_shows_it(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    size = f"--window-size={WIDE},{HEIGHT}"
    chromium(tmp_path, page, size, f"--screenshot={picture}")
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    assert pixels.shape[1] == WIDE
    colours = np.unique(pixels.reshape(-1, 3), axis=0)
    assert len(colours) > 50, "more than paper"
    for wanted in ((0xFF, 0xFF, 0xFF), (0x1F, 0x6F, 0xB4)):  # paper, and C0
        assert (pixels == wanted).all(axis=-1).sum() > 100
