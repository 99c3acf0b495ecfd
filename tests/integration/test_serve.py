"""The worker as a user meets it: started, asked, stopped, killed, and told nonsense."""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from orchestrator.tokenizer import Tokenizer
from stages.model.source import ModelSource
from tests.integration.worker import Worker, free_port, named_leftovers, run_to_end

pytestmark = pytest.mark.alone
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def worker(smollm2: ModelSource) -> Iterator[Worker]:
    """One worker on the embedded default, for tests that leave it as it was."""
    before = named_leftovers()
    running = Worker("--dtype", "float32").wait_ready()
    yield running
    code = running.stop()
    running.check_nothing_is_left()
    assert code == 0, "\n".join(running.lines)
    assert named_leftovers() == before


@pytest.fixture
def own_worker(smollm2: ModelSource) -> Iterator[Worker]:
    """A worker that the test ends."""
    running = Worker("--dtype", "float32").wait_ready()
    yield running
    running.kill()


# ---- asking -----------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered(worker: Worker) -> None:
    body = {"messages": FRANCE, "temperature": 0, "max_tokens": 20}
    answer = httpx.post(f"{worker.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "The capital of France is Paris."}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 8


def test_a_stream_gives_what_a_whole_answer_gives(worker: Worker) -> None:
    whole = worker.complete("Once upon a time", ignore_eos=True)
    *events, done = list(worker.stream("Once upon a time", max_tokens=16))
    assert done == "[DONE]"
    assert len(events) == 16, "one event for each token"
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_token_ids_and_text_are_the_same_prompt(worker: Worker, smollm2: ModelSource) -> None:
    text = "東京は日本の"
    ids = Tokenizer.from_directory(smollm2.path).encode(text)
    assert worker.complete(ids)["choices"][0]["text"] == worker.complete(text)["choices"][0]["text"]


def test_a_seed_repeats_an_answer(worker: Worker) -> None:
    first, second, other = (
        worker.complete("My favourite colour is", temperature=1.0, seed=seed)["choices"][0]["text"] for seed in (5, 5, 6)
    )
    assert first == second != other


def test_a_stop_string_ends_an_answer(worker: Worker) -> None:
    text = worker.complete("1, 2, 3, 4,", max_tokens=30)["choices"][0]["text"]
    stop = text[6:9]
    answer = worker.complete("1, 2, 3, 4,", max_tokens=30, stop=[stop])["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_many_at_once_get_what_each_gets_alone(worker: Worker) -> None:
    prompts = [f"{word} is a word that means" for word in ("Sun", "moon", "Brücke", "été", "море", "犬")]
    alone = [worker.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    together: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: together.update({i: worker.complete(prompts[i])["choices"][0]["text"]}))
        for i in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[i] for i in range(len(prompts))] == alone


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", r"max_tokens -1: must be at least 1"),
        ({"prompt": "x", "temperature": -1}, "temperature", r"temperature -1"),
        ({"prompt": [1] * 9000}, "prompt", r"9000 tokens.*8192"),
        ({"prompt": [10**6]}, "prompt", r"1000000"),
        ({"prompt": "x", "model": "other"}, "model", r"other"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_rule(
    worker: Worker, body: dict[str, object], param: str, message: str
) -> None:
    response = httpx.post(f"{worker.url}/v1/completions", json=body, timeout=60)
    assert 400 <= response.status_code < 500
    error = response.json()["error"]
    assert error["param"] == param
    assert re.search(message, error["message"]), error
    assert isinstance(error["code"], str)


def test_invalid_json_is_refused(worker: Worker) -> None:
    response = httpx.post(
        f"{worker.url}/v1/completions", content=b'{"prompt": ', headers={"content-type": "application/json"}, timeout=60
    )
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_place(worker: Worker) -> None:
    events = worker.stream("Tell me everything.", max_tokens=4000)
    next(events)
    assert "stagewire_requests_running 1.0" in httpx.get(f"{worker.url}/metrics").text
    events.close()
    deadline = time.monotonic() + 10
    while "stagewire_requests_running 0.0" not in httpx.get(f"{worker.url}/metrics").text:
        assert time.monotonic() < deadline, "the request of a client that left still runs"
    assert 'stagewire_requests_finished_total{reason="abort"} 1.0' in httpx.get(f"{worker.url}/metrics").text


def test_the_engine_never_loads_torch(worker: Worker) -> None:
    def libraries(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" not in libraries(worker.process.pid)
    assert all("libtorch" in libraries(rank.pid) for rank in worker.rank_processes()), "the check sees torch where it is"


def test_the_start_log_says_what_runs(worker: Worker) -> None:
    log = "\n".join(worker.lines)
    assert re.search(r"Ready: http://127\.0\.0\.1:\d+ \(pp 2, transport shared_memory, KV \d+ tokens\) in [\d.]+ s", log)
    rows = [re.match(r" +(\d) +(\S+) .* (\d+) MiB +[\d.]+ s +(\d+) MiB", line) for line in worker.lines]
    table = {int(row[1]): (row[2], int(row[3]), int(row[4])) for row in rows if row}
    assert {rank: layers for rank, (layers, _, _) in table.items()} == {0: "0..18", 1: "19..29"}
    largest_tensor_mib = 49152 * 576 * 4 / 2**20
    for rank, (_, slice_mib, growth_mib) in table.items():
        assert growth_mib <= 1.15 * slice_mib + largest_tensor_mib, f"rank {rank} took more than its slice"


def test_idle_burns_no_cpu(worker: Worker) -> None:
    worker.complete("warm", max_tokens=2)
    before = [sum(p.cpu_times()[:2]) for p in worker.family()]
    time.sleep(3)  # the thing measured is what happens while nothing happens
    used = [sum(p.cpu_times()[:2]) - was for p, was in zip(worker.family(), before, strict=True)]
    assert max(used) <= 0.03 * 3


# ---- starting and ending ----------------------------------------------------------------------------------------------


def test_it_lives_at_once_and_is_ready_when_it_says_so(smollm2: ModelSource) -> None:
    port = free_port()
    worker = Worker("--port", str(port), "--metrics-port", "0")
    try:
        while True:
            try:
                alive = httpx.get(f"http://127.0.0.1:{port}/livez")
                break
            except httpx.ConnectError:
                assert time.monotonic() - worker.started_at < 10
        assert alive.status_code == 200
        early = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"})
        assert (early.status_code, early.json()["error"]["type"]) == (503, "server_error")
        assert int(early.headers["retry-after"]) > 0
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 503
        worker.wait_ready()
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        assert worker.stop() == 0
    finally:
        worker.kill()


def test_starting_is_quick(smollm2: ModelSource) -> None:
    """It answers within 1.5 s and is ready within 10 s; the best of three, since other work can only slow a start down."""
    alive_seconds: list[float] = []
    ready_seconds: list[float] = []
    while len(alive_seconds) < 3 and not (min(alive_seconds, default=9) < 1.5 and min(ready_seconds, default=99) < 10):
        port = free_port()
        worker = Worker("--port", str(port), "--metrics-port", "0")
        try:
            while True:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/livez")
                    break
                except httpx.ConnectError:
                    assert time.monotonic() - worker.started_at < 10
            alive_seconds.append(time.monotonic() - worker.started_at)
            worker.wait_ready()
            ready_seconds.append(worker.ready_seconds)
            assert worker.stop() == 0
        finally:
            worker.kill()
    assert min(alive_seconds) < 1.5
    assert min(ready_seconds) < 10


def test_sigterm_while_starting_ends_at_once(smollm2: ModelSource) -> None:
    worker = Worker()
    try:
        deadline = time.monotonic() + 10
        while len(worker.rank_processes()) < 2:  # until both are there, and load
            assert time.monotonic() < deadline
        worker.rank_processes()[1].suspend()  # and one of them will never be ready
        assert worker.stop() == 0
        assert "stopped while starting" in worker.lines[-1]
        worker.check_nothing_is_left()
    finally:
        worker.kill()


def test_a_start_that_takes_too_long_names_the_missing_ranks(smollm2: ModelSource) -> None:
    code, lines = run_to_end("--port", "0", "--start-timeout", "0.2")
    assert code == 1
    assert lines[-1] == "stagewire: error: the ranks were not ready within --start-timeout 0.2 s; still missing: 0, 1"


def test_sigterm_lets_open_streams_finish(own_worker: Worker) -> None:
    events = own_worker.stream("Count: 1, 2, 3,", max_tokens=60)
    first = next(events)
    own_worker.process.send_signal(signal.SIGTERM)
    rest = list(events)
    assert rest[-1] == "[DONE]"
    assert len([first, *rest]) == 61
    assert own_worker.wait() == 0
    own_worker.check_nothing_is_left()


def test_a_second_signal_ends_open_streams_with_an_error(own_worker: Worker) -> None:
    events = own_worker.stream("Count: 1, 2, 3,", max_tokens=8000)
    next(events)
    own_worker.process.send_signal(signal.SIGTERM)
    next(events)
    own_worker.process.send_signal(signal.SIGTERM)
    *_, error, done = list(events)
    assert "shut down" in error["error"]["message"]
    assert done == "[DONE]"
    assert own_worker.wait() == 1
    own_worker.check_nothing_is_left()


def test_the_shutdown_timeout_ends_what_takes_too_long(smollm2: ModelSource) -> None:
    worker = Worker("--shutdown-timeout", "1").wait_ready()
    try:
        events = worker.stream("Count: 1, 2, 3,", max_tokens=8000)
        next(events)
        worker.process.send_signal(signal.SIGTERM)
        assert "error" in list(events)[-2]
        assert worker.wait() == 1
        assert "--shutdown-timeout 1" in worker.lines[-1]
        worker.check_nothing_is_left()
    finally:
        worker.kill()


def test_a_killed_rank_pauses_the_streams_and_is_replaced(own_worker: Worker) -> None:
    rank = 0
    before = named_leftovers()
    asked = [{"prompt": f"Story {i}:", "max_tokens": 40, "temperature": i % 2, "seed": i} for i in range(4)]
    wanted = [own_worker.complete(**fields, ignore_eos=True)["choices"][0]["text"] for fields in asked]
    streams = [own_worker.stream(**fields) for fields in asked]
    firsts = [next(events) for events in streams]
    ranks = own_worker.rank_processes()
    ranks[rank].kill()
    while (answer := httpx.get(f"{own_worker.url}/readyz")).status_code == 200:
        pass
    assert (answer.status_code, answer.json()["status"]) == (503, "recovering")
    assert httpx.get(f"{own_worker.url}/livez").status_code == 200
    for first, events, text in zip(firsts, streams, wanted, strict=True):
        *rest, done = list(events)
        assert done == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in [first, *rest]) == text
    assert httpx.get(f"{own_worker.url}/readyz").status_code == 200
    lives = own_worker.rank_processes()
    assert ranks[1 - rank] in lives, "the other one keeps its process"
    assert len(lives) == 2
    assert f'stagewire_rank_restarts_total{{rank="{rank}"}} 1.0' in httpx.get(f"{own_worker.url}/metrics").text
    assert own_worker.stop() == 0
    own_worker.check_nothing_is_left()
    assert named_leftovers() <= before


def test_a_killed_rank_ends_a_worker_that_must_not_restart_it(smollm2: ModelSource) -> None:
    running = Worker("--dtype", "float32", "--max-restarts", "0").wait_ready()
    try:
        streams = [running.stream(f"Story {i}:", max_tokens=4000) for i in range(3)]
        for events in streams:
            next(events)
        killed_at = time.monotonic()
        running.rank_processes()[1].kill()
        for events in streams:
            *_, error, done = list(events)
            assert error["error"]["message"] == "stage 1 failed: rank 1 was killed by SIGKILL"
            assert error["error"]["type"] == "server_error"
            assert done == "[DONE]"
        assert time.monotonic() - killed_at < 5
        assert running.wait() == 1
        assert running.lines[-1] == "stagewire: error: stage 1 failed: rank 1 was killed by SIGKILL"
        running.check_nothing_is_left()
    finally:
        running.kill()


def test_a_stopped_rank_is_replaced_after_the_step_timeout(smollm2: ModelSource) -> None:
    running = Worker("--dtype", "float32", "--step-timeout", "1").wait_ready()
    try:
        text = running.complete("Once upon a time", max_tokens=30, ignore_eos=True)["choices"][0]["text"]
        events = running.stream("Once upon a time", max_tokens=30)
        first = next(events)
        running.rank_processes()[1].suspend()
        *rest, done = list(events)
        assert done == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in [first, *rest]) == text
        log = "\n".join(running.lines)
        assert re.search(r"epoch 0 ended: stage 1 failed: no progress on step \d+ for 1 s \(--step-timeout\)", log)
        assert re.search(r"rank 1, process \d+: stopped; last seen in \w+ of step \d+ for [\d.]+ s", log)
        assert running.stop() == 0
        running.check_nothing_is_left()
    finally:
        running.kill()


def test_a_killed_engine_breaks_the_connections_and_takes_its_ranks_along(own_worker: Worker) -> None:
    before = named_leftovers()
    events = own_worker.stream("A story:", max_tokens=4000)
    next(events)
    own_worker.process.kill()
    with pytest.raises(httpx.RemoteProtocolError, match=r"incomplete chunked read"):
        list(events)
    assert own_worker.wait() == -signal.SIGKILL
    own_worker.check_nothing_is_left()
    assert named_leftovers() <= before


def test_all_ranks_in_one_process(smollm2: ModelSource) -> None:
    worker = Worker("-pp", "3", "--pp-transport", "memory", "--layer-split", "10,10,10", "--dtype", "float32").wait_ready()
    try:
        assert worker.complete("The capital of France is", max_tokens=4)["choices"][0]["text"].strip().startswith("Paris")
        assert len(worker.rank_processes()) == 1
        assert "(pp 3, transport memory," in "\n".join(worker.lines)
        assert worker.stop() == 0
        worker.check_nothing_is_left()
    finally:
        worker.kill()


# ---- nonsense ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/model"], r"--model /no/such/model: "),
        (["-pp", "31"], r"--pipeline-parallel-size 31: must be between 1 and the model's number of layers, 30"),
        (["--layer-split", "16,13"], r"--layer-split 16,13: adds up to 29, must add up to the model's 30 layers"),
        (["--layer-split", "30"], r"--layer-split 30: must have one part per stage \(2\), has 1"),
        (["--max-model-len", "100000"], r"--max-model-len 100000: must be at most the model's context, 8192"),
        (["--pipeline-paralel-size", "2"], r"unknown option --pipeline-paralel-size; did you mean --pipeline-parallel-size\?"),
        (["--port", "99999"], r"--port 99999: must be a whole number between 0 and 65535"),
        (["--host", "not.a.host.invalid"], r"--host not\.a\.host\.invalid: "),
        (["--host", "192.0.2.1"], r"--host 192\.0\.2\.1: must be an address of this machine"),
        (["--dtype", "float8"], r"--dtype float8: must be one of auto, float32, bfloat16, float16"),
    ],
)
def test_bad_options_are_one_line(smollm2: ModelSource, arguments: list[str], message: str) -> None:
    code, lines = run_to_end(*arguments)
    assert code == 2
    assert len(lines) == 1, lines
    assert re.match("stagewire: error: " + message, lines[0]), lines[0]


def test_an_unknown_variable_is_refused(smollm2: ModelSource) -> None:
    code, lines = run_to_end(env={"STAGEWIRE_PROT": "80"})
    assert (code, len(lines)) == (2, 1)
    assert "STAGEWIRE_PROT" in lines[0]
    assert "did you mean STAGEWIRE_PORT" in lines[0]


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, lines = run_to_end("--port", str(port))
    assert (code, len(lines)) == (2, 1)
    assert lines[0] == f"stagewire: error: --port {port}: must be free on 127.0.0.1 (Address already in use)"


def test_a_corrupt_gguf_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model at all")
    code, lines = run_to_end("--model", str(path))
    assert (code, len(lines)) == (2, 1)
    assert f"--model {path}" in lines[0]


def test_a_truncated_gguf_fails_in_the_conversion_with_one_line_last(smollm2: ModelSource, tmp_path: Path) -> None:
    from stages.model.source import locate_model

    whole = locate_model(None, "auto").gguf
    assert whole is not None
    path = tmp_path / "short.gguf"
    path.write_bytes(whole.read_bytes()[:2_000_000])
    before = named_leftovers()
    code, lines = run_to_end("--model", str(path), "--port", "0", env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert code in (1, 2)
    assert lines[-1].startswith("stagewire: error: ")
    assert "short.gguf" in lines[-1]
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix == ".safetensors"]
    assert named_leftovers() <= before


def test_a_model_that_cannot_be_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 4, "n_head": 4, "n_embd": 64}
    config |= {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 512, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = named_leftovers()
    code, lines = run_to_end("--model", str(tmp_path), "--load-format", "dummy", "--port", "0")
    assert code == 2
    assert re.match(r"stagewire: error: model type gpt2: ", lines[-1]), lines
    assert named_leftovers() <= before


def test_a_kv_cache_too_small_for_a_request_is_refused(smollm2: ModelSource) -> None:
    code, lines = run_to_end("--port", "0", "--kv-cache-memory-bytes", "1M", "--max-model-len", "4096")
    assert code == 2
    assert re.search(r"--kv-cache-memory-bytes 1048576: must hold at least one request of 4096 tokens", lines[-1]), lines


def test_no_process_of_a_refused_start_is_left(smollm2: ModelSource) -> None:
    def ranks() -> set[int]:
        return {
            p.pid
            for p in psutil.process_iter(["cmdline"])
            if "orchestrator.rank_main" in (p.info["cmdline"] or []) and str(os.getpid()) not in (p.info["cmdline"] or [])
        }

    before = ranks()
    run_to_end("--port", "0", "--kv-cache-memory-bytes", "1M", "--max-model-len", "4096")
    assert ranks() <= before
