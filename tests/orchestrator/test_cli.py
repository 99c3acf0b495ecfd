import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from orchestrator import __version__, cli
from orchestrator.config import OPTIONS, ServeConfig
from stages.errors import ConfigError, StageFailed

Serve = Callable[[ServeConfig], int]


@pytest.fixture
def serve_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Serve], None]:
    """Puts a function in the place of the server."""

    def use(serve: Serve) -> None:
        module = types.ModuleType("orchestrator.serve")
        module.serve = serve  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "orchestrator.serve", module)
        monkeypatch.setattr(cli, "set_up_logging", lambda level: None)  # pytest's own handlers stay

    return use


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


class TestServe:
    def test_parses_flags(self) -> None:
        config = cli.parse_serve(["-pp", "3", "--port=0", "--kv-cache-memory-bytes", "1G", "--layer-split", "1,2,3"], {})
        assert config == ServeConfig(pipeline_parallel_size=3, port=0, kv_cache_memory_bytes=2**30, layer_split=(1, 2, 3))

    def test_flag_that_repeats(self) -> None:
        assert cli.parse_serve(["--api-key", "one", "--api-key=two,three"], {}).api_key == ("one", "two", "three")

    def test_model_by_place_or_by_flag(self) -> None:
        assert cli.parse_serve(["m"], {}).model == "m"
        assert cli.parse_serve(["-pp", "1", "m"], {}).model == "m"
        assert cli.parse_serve(["--model", "m"], {}).model == "m"
        assert cli.parse_serve(["m", "--model", "m"], {}).model == "m"
        assert cli.parse_serve(["m"], {"STAGEWIRE_MODEL": "n"}).model == "m"
        with pytest.raises(ConfigError, match="--model n: must not differ"):
            cli.parse_serve(["m", "--model", "n"], {})

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--prot", "1"], "unknown option --prot; did you mean --port?"),
            (["--max_num_seqs=1"], "unknown option --max_num_seqs; did you mean --max-num-seqs?"),
            (["--max-num-seq", "1"], "unknown option --max-num-seq; did you mean --max-num-seqs?"),
            (["--xyzzy"], "unknown option --xyzzy"),
            (["a", "b"], "unexpected argument b: one MODEL may be given, options start with --"),
            (["--port"], "--port: expected one argument"),
            (["-pp"], "--pipeline-parallel-size: expected one argument"),
            (["-pp", "-1"], "--pipeline-parallel-size -1: must be a whole number between 1 and 1024"),
        ],
    )
    def test_bad_arguments(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], serve_with: Callable[[Serve], None]
    ) -> None:
        serve_with(lambda config: pytest.fail("served"))
        assert cli.main(["serve", *arguments]) == 2
        assert last_line(capsys) == f"stagewire: error: {message}"

    def test_help_names_every_option_and_variable(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main(["serve", "--help"])
        assert caught.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        for option in OPTIONS:
            assert option.flag in text
            assert f"[{option.variable}]" in text

    def test_the_environment_counts(self, monkeypatch: pytest.MonkeyPatch, serve_with: Callable[[Serve], None]) -> None:
        got: list[ServeConfig] = []
        serve_with(lambda config: got.append(config) or 0)
        monkeypatch.setenv("STAGEWIRE_MAX_QUEUE", "3")
        assert cli.main(["serve"]) == 0
        assert got == [ServeConfig(max_queue=3)]


class TestConfigShow:
    def show(self, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
        assert cli.main(["config", "show", *arguments]) == 0
        return capsys.readouterr().out

    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAGEWIRE_MAX_QUEUE", "3")

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "worker.yaml"
        path.write_text("port: 9000\nmax_queue: 5\nlayer_split: [16, 13, 1]\n")
        return path

    def test_the_table_says_where_each_value_came_from(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shown = self.show("--config", str(file), "-pp", "3", "m", capsys=capsys)
        rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in shown.splitlines()}
        assert rows["--model"] == ["m", "--model"]
        assert rows["--pipeline-parallel-size"] == ["3", "--pipeline-parallel-size"]
        assert rows["--max-queue"] == ["3", "STAGEWIRE_MAX_QUEUE"]
        assert rows["--port"] == ["9000", f"{file}:1: port"]
        assert rows["--layer-split"] == ["16,13,1", f"{file}:3: layer_split"]
        assert rows["--dtype"] == ["auto", "default"]
        assert len(rows) == len(OPTIONS) + 1

    @pytest.mark.parametrize("format", ["--json", "--yaml"])
    def test_the_files_give_the_same_config_back(
        self, format: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["--config", str(file), "-pp", "3", "--served-model-name", "null", "--model", 'a "b"\\: # ü']
        again = tmp_path / "again"
        again.write_text(self.show(format, *arguments, capsys=capsys))
        config = cli.parse_serve(arguments, {"STAGEWIRE_MAX_QUEUE": "3"})
        assert config.layer_split == (16, 13, 1)
        assert config.served_model_name == "null"
        assert cli.parse_serve(["--config", str(again)], {}) == config

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "config (nothing): must be config show"),
            (["shwo"], "config shwo: must be config show; did you mean show?"),
            (["show", "--jsn"], "unknown option --jsn"),
            (["show", "--confg", "x"], "unknown option --confg; did you mean --config?"),
            (["show", "--port", "x"], "--port x: must be a whole number between 0 and 65535"),
            (["show", "--json", "--yaml"], "--yaml: not allowed with argument --json"),
        ],
    )
    def test_bad_arguments(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["config", *arguments]) == 2
        assert last_line(capsys) == f"stagewire: error: {message}"


class TestExitCodes:
    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (ConfigError("--port 80: in use"), 2, "--port 80: in use"),
            (StageFailed(1, "killed"), 1, "stage 1 failed: killed"),
            (RuntimeError("a bug\nmore"), 1, "RuntimeError: a bug"),
        ],
    )
    def test_errors_are_the_last_line(
        self,
        error: Exception,
        code: int,
        line: str,
        capsys: pytest.CaptureFixture[str],
        serve_with: Callable[[Serve], None],
    ) -> None:
        def serve(config: ServeConfig) -> NoReturn:
            raise error

        serve_with(serve)
        assert cli.main(["serve"]) == code
        assert last_line(capsys) == f"stagewire: error: {line}"

    def test_a_bug_is_logged_with_its_traceback(
        self, caplog: pytest.LogCaptureFixture, serve_with: Callable[[Serve], None]
    ) -> None:
        def serve(config: ServeConfig) -> NoReturn:
            raise RuntimeError("a bug")

        serve_with(serve)
        cli.main(["serve"])
        assert "Traceback" in caplog.text

    def test_the_servers_own_code(self, serve_with: Callable[[Serve], None]) -> None:
        serve_with(lambda config: 1)
        assert cli.main(["serve"]) == 1


class TestCommands:
    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["version"]) == 0
        assert capsys.readouterr().out == f"stagewire {__version__}\n"

    def test_overview(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--help"]) == 0
        assert "serve" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "no command given; one of serve, rank, check, config, health, trace, version is needed"),
            (["srve"], "unknown command srve; did you mean serve?"),
        ],
    )
    def test_no_such_command(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(arguments) == 2
        assert last_line(capsys).startswith(f"stagewire: error: {message}")

    def test_rank_becomes_its_own_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Replaced(BaseException):
            pass

        def execv(path: str, arguments: list[str]) -> NoReturn:
            assert path == sys.executable
            assert arguments == [sys.executable, "-m", "orchestrator.rank_main", "--rank", "1", "--help"]
            raise Replaced

        monkeypatch.setattr("os.execv", execv)
        with pytest.raises(Replaced):
            cli.main(["rank", "--rank", "1", "--help"])

    def test_as_a_module(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", "serve", "--prot"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert done.stderr == "stagewire: error: unknown option --prot; did you mean --port?\n"


def test_a_usage_error_loads_no_server() -> None:
    code = (
        "import sys; from orchestrator.cli import main; main(['serve', '--prot']);"
        "sys.exit(bool({'torch', 'yaml', 'uvicorn', 'starlette', 'tokenizers', 'asyncio'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
