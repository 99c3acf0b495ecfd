"""The ``stagewire`` command. Exit codes: 0 drained, 1 runtime failure, 2 usage."""

import argparse
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from orchestrator import __version__
from orchestrator.config import (
    CONFIG_FLAG,
    CONFIG_HELP,
    CONFIG_VARIABLE,
    OPTIONS,
    Resolved,
    ServeConfig,
    load_config,
    resolve_config,
    suggestion,
)
from orchestrator.health import check_health
from stages.errors import ConfigError, StagewireError, one_line

DRAINED = 0
FAILED = 1
USAGE = 2

COMMANDS = {
    "serve": "serve a model over HTTP",
    "rank": "run one stage of a pipeline; started by serve, or by torchrun on other hosts",
    "check": "show what this machine can do, and whether it can serve what serve's options ask for",
    "config": "config show: print the config that options, variables and file give, and where each value came from",
    "health": "exit 0 when the worker on this host admits requests; a container's health check",
    "trace": "save a timeline of a running worker's last seconds",
    "version": "print the version",
}

_logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. An error is the last line on the screen: ``stagewire: error: ...``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments, os.environ)
    except ConfigError as exc:
        return _end_with(exc, USAGE)
    except StagewireError as exc:
        return _end_with(exc, FAILED)
    except Exception as exc:  # the process's edge: reported, and the exit code says so
        _logger.critical("unexpected error", exc_info=exc)
        return _end_with(exc, FAILED)


def _end_with(exc: Exception, code: int) -> int:
    sys.stdout.flush()
    print(f"stagewire: error: {one_line(exc)}", file=sys.stderr, flush=True)  # noqa: T201
    return code


def _run(arguments: list[str], environ: Mapping[str, str]) -> int:
    command = arguments[0] if arguments else ""
    if command in ("-h", "--help"):
        print(_overview())  # noqa: T201
        return DRAINED
    if command in ("version", "--version", "-V"):
        print(f"stagewire {__version__}")  # noqa: T201
        return DRAINED
    if command == "rank":
        exec_rank(arguments[1:])
    if command == "serve":
        return _serve(arguments[1:], environ)
    if command == "check":
        return _check(arguments[1:], environ)
    if command == "config":
        return _config(arguments[1:], environ)
    if command == "health":
        return _health(arguments[1:], environ)
    if command == "trace":
        return _trace(arguments[1:])
    if not command:
        raise ConfigError(f"no command given; one of {', '.join(COMMANDS)} is needed (see stagewire --help)")
    raise ConfigError(f"unknown command {command}{suggestion(command, COMMANDS)}")


def _overview() -> str:
    lines = "\n".join(f"  {name:<9} {text}" for name, text in COMMANDS.items())
    return f"usage: stagewire COMMAND ...\n\n{lines}\n\nstagewire COMMAND --help shows a command's options."


def _serve(arguments: list[str], environ: Mapping[str, str]) -> int:
    config = parse_serve(arguments, environ)
    set_up_logging(config.log_level)
    from orchestrator.serve import serve  # here, so that a usage error is told before a server is loaded

    return serve(config)


def _health(arguments: list[str], environ: Mapping[str, str]) -> int:
    parser = _Parser(prog="stagewire health", description="Exit 0 when the worker admits requests, else 1.", allow_abbrev=False)
    for option in OPTIONS:
        if option.field in ("host", "port"):
            parser.add_argument(
                option.flag, metavar=option.field.upper(), help=f"the worker's {option.flag} [{option.variable}]"
            )
    found = parser.parse_args(arguments)
    config = load_config({name: value for name, value in vars(found).items() if value is not None}, environ)
    print(check_health(config.host, config.port))  # noqa: T201
    return DRAINED


def _trace(arguments: list[str]) -> int:
    parser = _Parser(
        prog="stagewire trace",
        description="Save a timeline of a running worker, a track for each stream of each rank. Open it in https://ui.perfetto.dev.",
        allow_abbrev=False,
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="where to save it")
    parser.add_argument(
        "--url",
        default=f"http://127.0.0.1:{ServeConfig().wanted_metrics_port}",
        help="the address of the worker's metrics, which it prints when it is ready (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=10.0, metavar="N", help="how much of it (default: %(default)g)")
    found = parser.parse_args(arguments)
    from orchestrator.trace import save_trace  # here, so that no other command loads it

    num_bytes = save_trace(found.url, found.seconds, Path(found.output))
    print(f"{found.output}: {num_bytes} bytes; open it in https://ui.perfetto.dev", file=sys.stderr)  # noqa: T201
    return DRAINED


def exec_rank(arguments: list[str]) -> NoReturn:
    """Become a rank: this process has loaded nothing of the server's, the rank's program loads torch."""
    os.execv(sys.executable, [sys.executable, "-m", "orchestrator.rank_main", *arguments])


def set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def parse_serve(arguments: Sequence[str], environ: Mapping[str, str]) -> ServeConfig:
    """The config of the arguments after ``serve``, ``STAGEWIRE_*`` variables and a file; ``ConfigError`` for bad ones."""
    return _resolve(_serve_parser("serve", "Serve a model over HTTP, cut into pipeline stages."), arguments, environ)[0].config


def _check(arguments: list[str], environ: Mapping[str, str]) -> int:
    parser = _serve_parser("check", "Show what this machine can do; exit code 1 when it cannot serve what the options ask for.")
    resolved, _ = _resolve(parser, arguments, environ)
    from orchestrator.check import check  # here, so that a usage error is told before anything is looked at

    return check(resolved.config)


def _config(arguments: list[str], environ: Mapping[str, str]) -> int:
    action = arguments[0] if arguments else ""
    if action in ("-h", "--help"):
        print("usage: stagewire config show [--json | --yaml] [any option of serve]")  # noqa: T201
        return DRAINED
    if action != "show":
        raise ConfigError(f"config {action or '(nothing)'}: must be config show{suggestion(action, ['show'])}")
    parser = _serve_parser("config show", "Print the config that options, variables and file give.")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", dest="format", action="store_const", const="json", help="as JSON, which --config reads too")
    how.add_argument("--yaml", dest="format", action="store_const", const="yaml", help="as a file for --config")
    resolved, found = _resolve(parser, arguments[1:], environ)
    from orchestrator.show_config import FORMATS  # here: no other command needs it

    print(FORMATS[found.format or "table"](resolved))  # noqa: T201
    return DRAINED


def _resolve(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[Resolved, argparse.Namespace]:
    """The config, and all that the parser found."""
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError(_unknown_argument(unknown[0]))
    texts: dict[str, str | list[str] | None] = {option.field: getattr(found, option.field) for option in OPTIONS}
    given = {name: text if isinstance(text, str) else ",".join(text) for name, text in texts.items() if text is not None}
    positional: str | None = found.positional_model
    if positional is not None:
        if given.get("model", positional) != positional:
            raise ConfigError(f"--model {given['model']}: must not differ from the model given as MODEL, {positional}")
        given["model"] = positional
    return resolve_config(given, environ, found.config_file), found


def _unknown_argument(argument: str) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument}: one MODEL may be given, options start with --"
    flag = argument.partition("=")[0]
    flags = [CONFIG_FLAG, *(name for option in OPTIONS for name in (option.flag, *option.aliases))]
    return f"unknown option {flag}{suggestion(flag.replace('_', '-'), flags)}"


class _Parser(argparse.ArgumentParser):
    """Raises ``ConfigError`` instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        # argparse names every spelling of an option, "-pp/--pipeline-parallel-size"; one is enough
        raise ConfigError(re.sub(r"^argument (?:\S*/)?(\S+): ", r"\1: ", message))


def _serve_parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser of ``command`` that takes every option of serve."""
    parser = _Parser(
        prog=f"stagewire {command}",
        description=description,
        epilog="Each option can also be set by its variable, or in the file of --config: the flag wins over the variable, the "
        "variable over the file.",
        allow_abbrev=False,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument(CONFIG_FLAG, dest="config_file", metavar="FILE", help=f"{CONFIG_HELP} [{CONFIG_VARIABLE}]")
    groups: dict[str, argparse._ArgumentGroup] = {}  # pyright: ignore[reportPrivateUsage]
    for option in OPTIONS:
        group = groups.get(option.room) or groups.setdefault(option.room, parser.add_argument_group(option.room))
        default = "" if option.default is None or "(default" in option.help else f" (default: {option.default})"
        group.add_argument(
            *option.aliases,
            option.flag,
            dest=option.field,
            action="append" if option.repeats else "store",
            metavar=option.field.rpartition("_")[2].upper(),
            help=f"{option.help}{default} [{option.variable}]".replace("%", "%%"),
        )
    return parser
