"""``stagewire serve``: answers HTTP, drives the ranks, and ends in order. From the first bind to the last reaped child."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Generator
from typing import Any

import uvicorn
import uvloop

from metrics.catalog import Place, Writer
from metrics.engine import EngineMetrics
from metrics.ledger import LedgerWriter, create_ledger
from orchestrator import __version__
from orchestrator.api.app import create_app
from orchestrator.config import ServeConfig
from orchestrator.devices import CPU, check_devices, choose_devices, gpus_found
from orchestrator.engine import Engine
from orchestrator.exporter import ExporterProcess
from orchestrator.launch import Launcher, rank_environment, run_child
from orchestrator.loading import create_progress, describe_loads
from orchestrator.loop_lag import watch_loop_lag
from orchestrator.pipeline import Pipeline, PipelineConfig, assemble, describe
from orchestrator.recovery import Recovery
from orchestrator.request import ServedModel, ShutDown
from orchestrator.scheduler import Scheduler, SchedulerConfig
from orchestrator.sight import ProcessSight
from orchestrator.tokenizer import Tokenizer
from stages.errors import ConfigError, RankLost, StagewireError
from stages.model.source import ModelConfig, ModelSource, conversion_command, locate_model, read_model_config
from stages.plan import Setup
from stages.topology import check_layer_split, check_num_stages

log = logging.getLogger(__name__)

DRAINED = 0
RANK_EXIT_SECONDS = 5.0  # a drained rank frees its memory and ends; nothing it does then takes long
ERROR_EVENTS_SECONDS = 2.0  # for streams to be told why they end, when the worker gives up


def serve(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT has drained the worker; returns 0. Raises ``StagewireError`` when it cannot, or fails."""
    started_at = time.perf_counter()
    source = locate_model(config.model, config.load_format)
    if source.is_converted:
        check_model(config, read_model_config(source.path))
    with (
        contextlib.closing(bind(config.host, config.port)) as sock,
        contextlib.closing(bind(config.metrics_host, config.wanted_metrics_port, "--metrics-")) as metrics_sock,
    ):
        return uvloop.run(_Worker(config, source, sock, metrics_sock, started_at).run())


def bind(host: str, port: int, options: str = "--") -> socket.socket:
    """A listening socket; ``ConfigError`` naming the host or port option, which begin with ``options``, when there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as exc:
        raise ConfigError(f"{options}host {host}: must be an address of this machine ({exc.strerror})") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"{options}host {host}: must be an address of this machine ({exc.strerror})") from None
        raise ConfigError(f"{options}port {port}: must be free on {host} ({exc.strerror})") from None
    return sock


def check_model(config: ServeConfig, model: ModelConfig) -> None:
    """``ConfigError`` when the options do not fit the model."""
    check_num_stages(model.num_layers, config.pipeline_parallel_size)
    if config.layer_split is not None:
        check_layer_split(config.layer_split, model.num_layers, config.pipeline_parallel_size)
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ConfigError(f"--max-model-len {config.max_model_len}: must be at most the model's context, {model.max_model_len}")


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the worker decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Worker:
    """One life of the worker."""

    def __init__(
        self, config: ServeConfig, source: ModelSource, sock: socket.socket, metrics_sock: socket.socket, started_at: float
    ) -> None:
        self._config = config
        self._source = source
        self._sock = sock
        self._metrics_sock = metrics_sock
        self._ledgers = _create_ledgers(config.pipeline_parallel_size)
        self._exporter = ExporterProcess(metrics_sock, self._ledgers)
        self._started_at = started_at
        self._metrics = EngineMetrics(LedgerWriter(os.dup(self._ledgers[-1])))
        self._launcher = Launcher()
        self._sight = ProcessSight(lambda: self._launcher.process_ids, self._ledgers[:-1])
        self._engine = Engine(config.step_timeout, self._metrics, self._sight)
        self._tokenizer: Tokenizer | None = None
        self._is_stopping = asyncio.Event()  # the first SIGTERM or SIGINT
        self._is_aborting = asyncio.Event()  # the second
        exporter = metrics_sock.getsockname()[:2]
        app = create_app(self._engine, lambda: self._tokenizer, config, self._metrics, exporter)
        self._http = _HttpServer(
            uvicorn.Config(
                app, loop="none", lifespan="off", log_config=None, log_level="warning", access_log=False, server_header=False
            )
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        http = asyncio.create_task(self._http.serve(sockets=[self._sock]), name="http")
        exporting = asyncio.create_task(self._exporter.keep_running(), name="exporter")
        watching = asyncio.create_task(watch_loop_lag(self._metrics.loop_lag), name="loop lag")
        try:
            return await self._live()
        except RankLost as exc:
            raise await self._explain(exc) from None
        finally:
            self._http.should_exit = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ERROR_EVENTS_SECONDS):
                    await http
            self._launcher.kill()
            for task in (exporting, watching):
                task.cancel()
            await asyncio.gather(exporting, watching, return_exceptions=True)
            self._sight.close()
            for fd in self._ledgers:
                os.close(fd)

    def _on_signal(self) -> None:
        (self._is_aborting if self._is_stopping.is_set() else self._is_stopping).set()

    async def _live(self) -> int:
        starting = asyncio.create_task(self._start(), name="start")
        if await _first(starting, self._is_stopping.wait()) is not starting:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            log.info("stopped while starting")
            return DRAINED
        await starting
        serving = asyncio.create_task(self._engine.serve_ranks(self._recovery.recover), name="engine")
        probing = asyncio.create_task(self._probe(), name="probe")
        try:
            first = await _first(serving, probing, self._is_stopping.wait())
            if first is probing:
                await probing
                gc.freeze()  # what starting made lives as long as the process: no collection needs to walk it again
                self._engine.admit()
                self._announce()
                if await _first(serving, self._is_stopping.wait()) is not serving:
                    return await self._drain(serving)
            elif first is not serving:
                log.info("stopped while starting")
                return DRAINED
            await serving
            raise StagewireError("the ranks ended unasked")
        finally:
            for task in (serving, probing):
                task.cancel()
            await asyncio.gather(serving, probing, return_exceptions=True)

    # ---- start ----------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """From a model's name to a linked pipeline."""
        config = self._config
        if not self._source.is_converted:
            log.info("converting %s once; this takes a while", self._source.gguf)
            await run_child(conversion_command(self._source))
        model = read_model_config(self._source.path)
        check_model(config, model)
        try:
            async with asyncio.TaskGroup() as tasks:
                tokenizer = tasks.create_task(asyncio.to_thread(self._load_tokenizer), name="tokenizer")
                assembling = tasks.create_task(self._assemble(model), name="assemble")
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        self._tokenizer = tokenizer.result()
        pipeline = assembling.result()
        limits = pipeline.limits
        scheduler = Scheduler(
            SchedulerConfig(
                num_stages=len(pipeline.channels),
                lane_depth=limits.lane_depth,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
                max_waiting=config.max_queue,
                eos_token_ids=model.eos_token_ids,
                epoch=pipeline.epoch,
            )
        )
        served = ServedModel(
            name=config.served_model_name or self._source.name,
            max_model_len=limits.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            created=int(time.time()),
        )
        self._engine.open(pipeline, scheduler, served)
        self._metrics.describe(
            __version__,
            {
                "model": served.name,
                "dtype": pipeline.offers[0].boundary[0].dtype if pipeline.offers[0].boundary else config.dtype,
                "device": config.device,
                "pipeline_parallel_size": len(pipeline.channels),
                "pp_transport": pipeline.transport,
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_model_len": limits.max_model_len,
                "block_size": limits.block_size,
                "ring_slots": limits.ring_slots,
            },
        )
        self._pipeline = pipeline

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(self._config.start_timeout):
                await self._engine.probe()
        except TimeoutError:
            raise StagewireError(
                f"--start-timeout {self._config.start_timeout:g}: the first step did not come back; "
                f"steps and ranks still to report: {self._engine.unfinished_steps()}"
            ) from None

    def _load_tokenizer(self) -> Tokenizer | None:
        if self._config.load_format == "dummy" and not (self._source.path / "tokenizer.json").is_file():
            log.warning("no tokenizer.json beside the config: only prompts of token ids can be served")
            return None
        return Tokenizer.from_directory(self._source.path)

    async def _assemble(self, model: ModelConfig) -> Pipeline:
        config = self._config
        num_ranks = config.pipeline_parallel_size
        num_threads = config.num_threads(num_ranks)
        devices, reason = choose_devices(config.device, num_ranks, gpus_found())
        log.info("devices %s: %s", ", ".join(devices), reason)
        check_devices(config, devices)
        ranks = list(range(num_ranks))
        groups = [ranks] if config.pp_transport == "memory" else [[rank] for rank in ranks]
        argv = [sys.executable, "-m", "orchestrator.rank_main", "--log-level", config.log_level]
        ledgers = dict(zip(ranks, self._ledgers, strict=False))  # the engine's is the last
        await self._launcher.start(groups, lambda _: argv, rank_environment(os.environ, num_threads), ledgers)
        max_model_len = config.max_model_len or model.max_model_len
        setups = [
            Setup(
                rank=rank,
                world_size=num_ranks,
                model_name=self._source.name,
                model_path=str(self._source.path),
                load_format=self._source.load_format,
                dtype=config.dtype,
                layer_split=list(config.layer_split or ()),
                num_threads=num_threads,
                cpus=config.cpus_of(rank, num_ranks) if len(groups) == num_ranks and devices[rank] == CPU else [],
                ranks_on_host=num_ranks,
                block_size=config.block_size,
                kv_cache_bytes=config.kv_cache_memory_bytes or 0,
                max_num_seqs=config.max_num_seqs,
                max_model_len=max_model_len,
                device=devices[rank],
                ranks_on_device=devices.count(devices[rank]),
                spin_us=config.spin_us,
            )
            for rank in ranks
        ]
        wanted = PipelineConfig(
            wanted_transport=config.pp_transport,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            is_max_model_len_given=config.max_model_len is not None,
            ring_slots=config.ring_slots,
            kv_cache_bytes=config.kv_cache_memory_bytes or 0,
            start_timeout_seconds=config.start_timeout,
        )
        with contextlib.closing(create_progress(num_ranks, sys.stderr)) as progress:
            pipeline = await assemble(self._launcher.channels, setups, wanted, progress.update)
        self._recovery = Recovery(
            self._launcher, setups, wanted, pipeline, config.max_restarts, config.step_timeout, self._sight
        )
        for line in describe_loads(pipeline.offers):
            log.info("%s", line)
        return pipeline

    def _announce(self) -> None:
        pipeline, limits = self._pipeline, self._pipeline.limits
        log.info("transport %s: %s", pipeline.transport, pipeline.reason)
        seconds = time.perf_counter() - self._started_at
        print(describe(pipeline), file=sys.stderr)  # noqa: T201
        print(  # noqa: T201
            f"Ready: {_url(self._sock)} (pp {len(pipeline.channels)}, transport {pipeline.transport}, "
            f"KV {limits.num_blocks * limits.block_size} tokens) in {seconds:.1f} s; "
            f"the pipeline live: {_url(self._metrics_sock)}/pipeline",
            file=sys.stderr,
            flush=True,
        )

    # ---- end ------------------------------------------------------------------------------------------------------

    async def _drain(self, serving: asyncio.Task[None]) -> int:
        """Finish what is open; a second signal, or ``--shutdown-timeout``, ends it instead."""
        num_open = self._engine.num_running + self._engine.num_waiting
        log.info("draining: %d open requests get up to %g s", num_open, self._config.shutdown_timeout)
        try:
            async with asyncio.timeout(self._config.shutdown_timeout):
                draining = asyncio.create_task(self._engine.drain(), name="drain")
                ended = await _first(draining, self._is_aborting.wait(), serving)
                if ended is serving:
                    await serving
                elif ended is draining:
                    await serving
                    await self._launcher.stop(RANK_EXIT_SECONDS)
                    log.info("drained")
                    return DRAINED
                reason = "a second signal came"
        except TimeoutError:
            reason = f"--shutdown-timeout {self._config.shutdown_timeout:g} passed"
        num_open = self._engine.num_running + self._engine.num_waiting
        self._engine.abort(ShutDown("the worker was shut down before the request was finished"))
        raise StagewireError(f"{reason}: {num_open} open requests were ended")

    async def _explain(self, lost: RankLost) -> StagewireError:
        """What the operating system says of a lost rank's process."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return StagewireError((await self._launcher.wait_failed()).cause)
        return lost


async def _first(*waits: asyncio.Task[Any] | Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """The task that is done first, the earliest of ``waits`` when several are. Coroutines among them are cancelled then."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait and not task.done():
                task.cancel()
    return next(task for task in tasks if task.done())


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _create_ledgers(num_ranks: int) -> list[int]:
    places = [Place(writer=Writer.RANK, rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
    return [create_ledger(place) for place in [*places, Place(writer=Writer.ENGINE, rank=-1, world_size=num_ranks)]]
