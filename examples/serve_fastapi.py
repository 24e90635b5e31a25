"""Serve maps over HTTP
====================

A web service with FastAPI. All threads share one model and one explainer. Uploads are limited in bytes, pixels, number and time.
An error is an answer with its message and its fix.

**This page is not executed** when the documentation is built, since a server does not end. It needs `pip install . fastapi
uvicorn` in a clone. Start it, then send an image:

.. code-block:: bash

   uvicorn serve_fastapi:app --app-dir examples
   curl --data-binary @scan.png "http://127.0.0.1:8000/explain?target=nodule" --output map.png

:doc:`/how-to/serve` explains the limits and has the measured rate and memory.
"""

# %%
# Limits
# ------
# Replace `build_phantom_explainer` by a function that builds your own model and explainer. It runs once, when the server starts.

import logging
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

from anyio import CapacityLimiter, move_on_after, to_thread
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

from camscope import Explainer, GradCAM, load_model
from camscope.errors import CamscopeError, CamscopeWarning
from camscope.images.photo_reader import read_photo
from camscope.render import encode_image

MAX_BYTES, MAX_PIXELS, MAX_SECONDS = 10 * 2**20, 25_000_000, 30  # of one upload
MAX_RUNNING, MAX_WAITING = 2, 16  # requests that compute, and others that upload or wait for their turn
MAX_MESSAGES = 100  # different warnings that are counted


def build_phantom_explainer() -> Explainer:
    """Build the explainer of the bundled model."""
    return GradCAM(load_model("phantom"), "layer4")


# %%
# Warnings
# --------
# A warning is logged the first time, and counted each time.


def log_once_and_count(counts: dict[str, int]) -> Callable[..., None]:
    """Return a function for `warnings.showwarning`."""
    lock, show_other_warning = threading.Lock(), warnings.showwarning

    def show_warning(message: Warning | str, category: type[Warning], *details: Any, **options: Any) -> None:
        if not issubclass(category, CamscopeWarning):
            show_other_warning(message, category, *details, **options)
            return
        text = str(message)
        with lock:
            is_new = text not in counts and len(counts) < MAX_MESSAGES
            if is_new or text in counts:
                counts[text] = counts.get(text, 0) + 1
        if is_new:
            logging.getLogger("camscope").warning(text)

    return show_warning


# %%
# The application
# ---------------
# The number of requests is checked before a body is read, so that the memory of all uploads has a bound.


def create_app(build_explainer: Callable[[], Explainer] = build_phantom_explainer) -> FastAPI:
    """Create the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.explainer, app.state.warning_counts, app.state.n_requests = build_explainer(), {}, 0
        app.state.limiter = CapacityLimiter(MAX_RUNNING)
        with warnings.catch_warnings():
            warnings.simplefilter("always", CamscopeWarning)
            warnings.showwarning = log_once_and_count(app.state.warning_counts)
            yield

    app = FastAPI(title="camscope", lifespan=lifespan)

    @app.exception_handler(CamscopeError)
    async def answer_error(request: Request, error: CamscopeError) -> JSONResponse:
        content = {"error": type(error).__name__, "message": error.problem, "fix": error.fix}
        return JSONResponse(content, 422)

    @app.post("/explain")
    async def explain(request: Request, target: Annotated[str | None, Query(max_length=200)] = None) -> Response:
        """Return the overlay of the image in the body as a PNG. Score, status and target are in the headers."""
        if app.state.n_requests >= MAX_RUNNING + MAX_WAITING:
            return JSONResponse({"error": "Busy", "message": "try again later"}, 503, headers={"Retry-After": "1"})
        app.state.n_requests += 1
        try:
            with move_on_after(MAX_SECONDS) as reading:
                data = await read_limited_body(request)
            if reading.cancelled_caught:
                return JSONResponse({"error": "Timeout", "message": f"more than {MAX_SECONDS} seconds"}, 408)
            if data is None:
                return JSONResponse({"error": "TooLarge", "message": f"more than {MAX_BYTES} bytes"}, 413)
            compute = partial(explain_bytes, app.state.explainer, data, target)
            return await to_thread.run_sync(compute, limiter=app.state.limiter)
        finally:
            app.state.n_requests -= 1

    @app.get("/warnings")
    async def read_warnings() -> dict[str, int]:
        """Return the warnings since the start, with their counts."""
        return dict(app.state.warning_counts)

    return app


async def read_limited_body(request: Request) -> bytes | None:
    """Read the body of a request. Return None as soon as it exceeds MAX_BYTES."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


# %%
# One request
# -----------
# The reader checks the number of pixels before it decodes them. Nothing is unpickled. Headers are ASCII, so the name of the class
# is percent-encoded.


def explain_bytes(explainer: Explainer, data: bytes, target: str | None) -> Response:
    """Explain one upload."""
    photo = read_photo(data, max_pixels=MAX_PIXELS)
    class_index_or_name = int(target) if target is not None and target.isdecimal() else target
    explanation = explainer.explain(photo.pixels, class_index_or_name)
    headers = {
        "X-Score": repr(explanation.score),
        "X-Status": explanation.status,
        "X-Target": quote(str(explanation.label if explanation.label is not None else explanation.target)),
    }
    return Response(encode_image(explanation.annotated_image(), ".png"), media_type="image/png", headers=headers)


app = create_app()
