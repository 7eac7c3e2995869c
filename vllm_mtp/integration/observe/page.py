"""``GET /mtp_plus``: the page of `vllm_mtp/page/`, and the data it asks for.

An endpoint plugin of vLLM (``vllm.endpoint_plugins``), which loads it where
``VLLM_PLUGINS`` names ``mtp_plus``. The page itself holds no data. Its charts are drawn
from ``/metrics``. Rounds are below ``/v1``, all of which vLLM's server answers with 401
without its API key; the page asks for the key and keeps it until it is closed.
"""

from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse

from vllm_mtp.config import METHOD
from vllm_mtp.integration.observe.recent_requests import (
    decoder_of,
    recent_requests,
)
from vllm_mtp.page.document import document
from vllm_mtp.page.texts import described, with_texts

PAGE_PATH = f"/{METHOD}"
ROUNDS_PATH = f"/v1/{METHOD}/rounds"
_HEADERS = {
    # What the document's own policy cannot say.
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_STATE = f"{METHOD}_engine"


class RoundsPage:
    """What vLLM expects of an endpoint plugin."""

    name = METHOD
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; they are functions that FastAPI runs in threads."""
        app.add_api_route(PAGE_PATH, page, response_class=HTMLResponse)
        checks = [Depends(refuse_other_sites)]
        app.add_api_route(ROUNDS_PATH, list_requests, dependencies=checks)
        one = f"{ROUNDS_PATH}/{{key}}"
        app.add_api_route(one, show_request, dependencies=checks)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember whom to ask."""
        setattr(state, _STATE, engine_client)


def page() -> HTMLResponse:
    """The page, without any data."""
    return HTMLResponse(document(), headers=_HEADERS)


def refuse_other_sites(request: Request) -> None:
    """What others asked the server is not for pages of other sites to read.

    vLLM's server lets pages of any origin read its answers, unless told otherwise. A
    browser names the origin of such a page, and none for the server's own.

    Raises:
        HTTPException: 403, another site's page asks.
    """
    if "origin" in request.headers:
        raise HTTPException(403, "rounds are for the server's own page")


def list_requests(request: Request) -> dict[str, Any]:
    """Recent requests, newest first, without texts."""
    recent = recent_requests(_engine(request))
    listed = recent.newest_first() if recent is not None else {}
    return {
        "max_requests": recent.max_requests if recent is not None else 0,
        "requests": [{"key": key, **described(each)} for key, each in listed.items()],
    }


def show_request(request: Request, key: str) -> dict[str, Any]:
    """One of them with its rounds.

    Raises:
        HTTPException: 404, it is not kept.
    """
    engine = _engine(request)
    recent = recent_requests(engine)
    found = None if recent is None else recent.newest_first().get(key)
    if found is None:
        raise HTTPException(404, f"request {key!r} is not kept")
    return {"key": key, **with_texts(found, decoder_of(engine))}


def _engine(request: Request) -> Any:
    return getattr(request.app.state, _STATE, None)
