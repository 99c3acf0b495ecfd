"""Serves what the ledgers say: ``/metrics``, ``/trace``, ``/pipeline``. It only reads memory, so it answers whatever the
ranks do."""

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from importlib.resources import files

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from metrics.collector import LedgerCollector
from metrics.live import SAMPLE_SECONDS, PipelineView
from metrics.reader import LedgerReader
from metrics.timeline import trace_chunks

log = logging.getLogger(__name__)

TRACE_SECONDS = 10.0
MAX_TRACE_SECONDS = 3600.0
_MAX_CONNECTIONS = 64  # each of a scraper, a page or a person; more than that is a mistake, and is answered 503
_GZIP_LEVEL = 1  # a timeline compresses eightfold at that level already, in a sixth of the time of level 9
_PAGE_HEADERS = {
    # Nothing from elsewhere, and nothing to elsewhere.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'",
    "cache-control": "no-store",
}
_NOT_STORED = {"cache-control": "no-store"}


class Exporter:
    """The routes over the ledgers of one pipeline."""

    def __init__(self, readers: Sequence[LedgerReader]) -> None:
        self._view = PipelineView(readers)
        self._registry = CollectorRegistry()
        self._registry.register(LedgerCollector(readers))
        ProcessCollector(registry=self._registry)
        self._page = files("metrics").joinpath("pipeline.html").read_bytes()
        self.app = Starlette(
            routes=[
                Route("/", self.page),
                Route("/pipeline", self.page),
                Route("/pipeline.json", self.page_data),
                Route("/metrics", self.metrics),
                Route("/trace", self.trace),
                Route("/healthz", self.healthz),
            ],
            middleware=[Middleware(GZipMiddleware, compresslevel=_GZIP_LEVEL)],
        )

    async def serve(self, sock: socket.socket) -> None:
        """Serve connections of ``sock`` until a signal ends it."""
        server = uvicorn.Server(
            uvicorn.Config(
                self.app,
                loop="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=_MAX_CONNECTIONS,
                timeout_graceful_shutdown=1,
            )
        )
        sampling = asyncio.create_task(self._sample(), name="sample")
        try:
            await server.serve(sockets=[sock])
        finally:
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling

    async def _sample(self) -> None:
        while True:
            self._view.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    async def metrics(self, request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # it reads a version that is no number as one
            encode, content_type = choose_encoder("")
        self._view.fold()
        return Response(encode(self._registry), headers={"content-type": content_type})

    async def trace(self, request: Request) -> Response:
        text = request.query_params.get("seconds", f"{TRACE_SECONDS:g}")
        seconds = _parse_seconds(text)
        if seconds is None:
            rule = f"must be a number above 0 and at most {MAX_TRACE_SECONDS:g}"
            return PlainTextResponse(f"seconds {text[:100]}: {rule}\n", 400)
        headers = {"content-disposition": 'attachment; filename="stagewire-trace.json"', **_NOT_STORED}
        return StreamingResponse(self._trace(seconds), headers=headers, media_type="application/json")

    async def _trace(self, seconds: float) -> AsyncIterator[bytes]:
        for chunk in trace_chunks(self._view.tracks(seconds), self._view.facts()):
            yield chunk
            await asyncio.sleep(0)  # others are answered in between

    async def page(self, request: Request) -> Response:
        return Response(self._page, headers=_PAGE_HEADERS, media_type="text/html")

    async def page_data(self, request: Request) -> Response:
        text = request.query_params.get("since", "0")
        if not (text.isascii() and text.isdecimal() and len(text) <= 19):
            return PlainTextResponse(f"since {text[:100]}: must be the at_ns of a sample, or 0\n", 400)
        data = msgspec.json.encode(self._view.page_data(int(text)))
        return Response(data, headers=_NOT_STORED, media_type="application/json")

    async def healthz(self, request: Request) -> Response:
        """200 while this process answers; how the ranks are is what it tells elsewhere."""
        return PlainTextResponse("ok\n")


def _parse_seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and 0 < seconds <= MAX_TRACE_SECONDS else None
