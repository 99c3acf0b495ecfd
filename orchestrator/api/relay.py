"""Passes a request for metrics on to the exporter, so that one scrape of the API shows the engine and the ranks."""

import asyncio
import ipaddress
from collections.abc import Mapping

import h11
from starlette.responses import Response

from orchestrator.api.errors import ApiError

Address = tuple[str, int]

TIMEOUT_SECONDS = 5.0  # it answers within milliseconds; while it is started again, connections wait
_MAX_BYTES = 64 << 20
_PASSED_ON = ("accept", "accept-encoding")
_PASSED_BACK = ("content-type", "content-encoding", "vary")


class MetricsRelay:
    def __init__(self, address: Address) -> None:
        self._host, self._port = reachable(address)

    async def get(self, headers: Mapping[str, str]) -> Response:
        """The exporter's answer, whole; ``ApiError`` 503 when it gives none."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await self._get(headers)
        except (OSError, h11.ProtocolError, TimeoutError) as exc:
            reason = str(exc) or f"no answer for {TIMEOUT_SECONDS:g} s"
            message = (
                f"the metrics exporter at {self._host}:{self._port} does not answer ({reason}); it is started again by itself"
            )
            raise ApiError(
                503, message, code="exporter_unavailable", type="server_error", headers={"retry-after": "1"}
            ) from exc

    async def _get(self, headers: Mapping[str, str]) -> Response:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            connection = h11.Connection(h11.CLIENT)
            passed_on = [(name, headers[name]) for name in _PASSED_ON if name in headers]
            request = h11.Request(
                method="GET",
                target="/metrics",
                headers=[("host", f"{self._host}:{self._port}"), ("connection", "close"), *passed_on],
            )
            writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
            return await _receive(connection, reader)
        finally:
            writer.close()


async def _receive(connection: h11.Connection, reader: asyncio.StreamReader) -> Response:
    status, headers, body = 0, dict[str, str](), bytearray()
    while True:
        match connection.next_event():
            case h11.NEED_DATA:
                connection.receive_data(await reader.read(65536))
            case h11.Response() as response:
                status = response.status_code
                headers = {name.decode(): value.decode("latin-1") for name, value in response.headers}
            case h11.Data() as data:
                body += data.data
                if len(body) > _MAX_BYTES:
                    raise h11.RemoteProtocolError(f"its answer has more than {_MAX_BYTES} bytes")
            case h11.EndOfMessage():
                passed_back = {name: headers[name] for name in _PASSED_BACK if name in headers}
                return Response(bytes(body), status, passed_back)
            case event:
                raise h11.RemoteProtocolError(f"unexpected {event!r}")


def reachable(address: Address) -> Address:
    """The address for a client on this host: that of a socket which listens on all interfaces is none to connect to."""
    host, port = address
    ip = ipaddress.ip_address(host)
    if ip.is_unspecified:
        host = "127.0.0.1" if ip.version == 4 else "::1"
    return host, port
