"""``python -m metrics --ledger LEDGER...``: the exporter, a process of its own, so that a scrape costs no rank anything.

``stagewire serve`` starts one; by hand it watches ledgers that are files.
"""

import argparse
import asyncio
import gc
import socket
import sys
from collections.abc import Sequence

from metrics.exporter import Exporter
from metrics.ledger import LedgerError
from metrics.reader import LedgerReader

USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m metrics", description="Serve /metrics, /trace and /pipeline from ledgers.", allow_abbrev=False
    )
    parser.add_argument(
        "--ledger", action="append", required=True, metavar="LEDGER", help="a file, or the number of an inherited descriptor"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=9100, help="port to listen on (default: 9100)")
    parser.add_argument("--listen-fd", type=int, metavar="FD", help="a listening socket that is inherited, instead of those")
    args = parser.parse_args(argv)
    readers: list[LedgerReader] = []
    for source in args.ledger:
        try:
            readers.append(LedgerReader(int(source) if source.isdecimal() else source))
        except (OSError, LedgerError) as exc:
            return _refuse(f"--ledger {source}: {exc.strerror if isinstance(exc, OSError) else exc}")
        if readers[-1].place in (reader.place for reader in readers[:-1]):
            return _refuse(f"--ledger {source}: must be another's than those before")
    try:
        sock = _listening_socket(args.listen_fd, args.host, args.port)
    except (OSError, OverflowError) as exc:
        return _refuse(f"--host {args.host}, --port {args.port}: cannot listen there ({exc})")
    if args.listen_fd is None:
        host, port = sock.getsockname()[:2]
        print(f"http://{host}:{port}/pipeline", file=sys.stderr, flush=True)  # noqa: T201
    exporter = Exporter(readers)
    gc.collect()
    gc.freeze()  # what starting made lives as long as the process
    asyncio.run(exporter.serve(sock))
    return 0


def _listening_socket(fd: int | None, host: str, port: int) -> socket.socket:
    if fd is not None:
        return socket.socket(fileno=fd)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _refuse(message: str) -> int:
    print(f"metrics: error: {message}", file=sys.stderr, flush=True)  # noqa: T201
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
