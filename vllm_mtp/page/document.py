"""The page as one document: markup, style, scripts and uPlot, and perhaps data.

Nothing is loaded from elsewhere, and a content security policy forbids it: scripts run
if they have the hash of ours, so that no text of a model could ever become one. uPlot
(`assets/uPlot.LICENSE`, MIT) draws the charts; its version is in `assets/README.md`.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = (
    "uPlot.iife.min.js",
    "closed_form.js",
    "metrics.js",
    "charts.js",
    "viewer.js",
    "page.js",
)
"""In the order in which they run."""


def document(data: Mapping[str, Any] | None = None) -> str:
    """The page.

    Args:
        data: ``requests``, data of `texts.py`, and ``model``, to be embedded; None for
            a page that asks its server.
    """
    styles, scripts = _joined(STYLES), _joined(SCRIPTS)
    source = "'self'" if data is None else "'none'"
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{_hash(scripts)}'",
            f"style-src 'sha256-{_hash(styles)}'",
            "img-src data:",
            f"connect-src {source}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    embedded = "" if data is None else _as_json(data)
    page = _asset("page.html")
    for mark, text in (
        ("{{policy}}", policy),
        ("{{styles}}", styles),
        ("{{scripts}}", scripts),
        ("{{data}}", embedded),  # the last: it may have any of the marks in it
    ):
        before, found, after = page.partition(mark)
        assert found, mark
        page = before + text + after
    return page


def _as_json(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it is in."""
    return json.dumps(data).replace("<", "\\u003c")


@cache
def _joined(names: tuple[str, ...]) -> str:
    return "\n".join(map(_asset, names))


def _asset(name: str) -> str:
    asset = files("vllm_mtp.page").joinpath("assets", name)
    return asset.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
