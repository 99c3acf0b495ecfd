import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator import __version__
from orchestrator.api.app import create_app
from orchestrator.api.schema import ChatRequest, CompletionRequest
from orchestrator.config import ServeConfig
from orchestrator.request import EngineState, FinishReason, NotReady, QueueFull, TokenChunk
from orchestrator.tokenizer import Tokenizer
from stages.errors import ConfigError, StageFailed
from tests.ledgers import EngineLedger
from tests.orchestrator.fake_engine import MODEL, FakeEngine, chunks
from tests.orchestrator.small_tokenizer import write_tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
NOWHERE = ("127.0.0.1", 9)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Server:
    """The application around a fake engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.engine = FakeEngine()
        self.tokenizer: Tokenizer | None = tokenizer
        ledger = EngineLedger()
        self.metrics, self.value = ledger.metrics, ledger.value
        self.config = ServeConfig(max_body_bytes=16384)
        self.app = self.create_app(NOWHERE)

    def create_app(self, exporter: tuple[str, int]) -> Starlette:
        return create_app(self.engine, lambda: self.tokenizer, self.config, self.metrics, exporter)

    def will_say(self, text: str, reason: FinishReason | None = FinishReason.LENGTH) -> None:
        assert self.tokenizer is not None
        self.engine.script = chunks(self.tokenizer.encode(text), reason)

    def finished(self) -> dict[str, float]:
        reasons = ("stop", "length", "abort", "error")
        return {reason: n for reason in reasons if (n := self.value("requests_finished_total", reason))}

    def rejected(self) -> dict[str, float]:
        reasons = ("queue_full", "not_ready", "invalid")
        return {reason: n for reason in reasons if (n := self.value("requests_rejected_total", reason))}


@pytest.fixture
def server(tokenizer: Tokenizer) -> Server:
    return Server(tokenizer)


def asgi_client(app: Starlette) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://stagewire")


@contextlib.asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[tuple[str, int]]:
    """Through uvicorn and a socket, whose address is given."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=2)
    uvicorn_server = uvicorn.Server(config)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(uvicorn_server._serve([listener]), name="uvicorn")
        yield listener.getsockname()
        uvicorn_server.should_exit = True
        await task
    listener.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi_client(server.app) as client:
        yield client


@pytest.fixture
async def real_client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(server.app) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=20) as client,
    ):
        yield client


def body(route: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": "Hi", **fields} if route == COMPLETIONS else {"messages": USER, **fields}


def events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    found = [line.removeprefix("data: ") for line in text.removesuffix("\n\n").split("\n\n")]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def assert_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    """The message, after checking that the rest is an OpenAI error object."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert isinstance(error["type"], str)
    assert "\n" not in error["message"]
    assert len(error["message"]) <= 500
    return error["message"]


class TestWholeAnswers:
    async def test_completion(self, server: Server, client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
        server.will_say("one two three")
        answer = (await client.post(COMPLETIONS, json={"model": "small", "prompt": "The quick"})).json()
        assert answer["object"] == "text_completion"
        assert answer["model"] == "small"
        assert answer["id"].startswith("cmpl-")
        assert answer["system_fingerprint"].startswith(f"stagewire-{__version__}-pp2-")
        [choice] = answer["choices"]
        assert choice["text"] == "one two three"
        assert choice["finish_reason"] == "length"
        num_prompt, num_generated = len(tokenizer.encode("The quick")), len(tokenizer.encode("one two three"))
        assert answer["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }
        assert server.engine.calls[0].prompt_token_ids == tokenizer.encode("The quick")

    async def test_chat(self, server: Server, client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
        server.will_say("one two", FinishReason.STOP)
        answer = (await client.post(CHAT, json={"messages": USER})).json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "one two"}
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert server.engine.calls[0].prompt_token_ids == tokenizer.apply_chat_template(USER)

    @pytest.mark.parametrize("prompt", [[74, 75], [[74, 75]], ["hi"], "hi"])
    async def test_forms_of_a_prompt(
        self, server: Server, client: httpx.AsyncClient, tokenizer: Tokenizer, prompt: object
    ) -> None:
        server.will_say("x")
        assert (await client.post(COMPLETIONS, json={"prompt": prompt})).status_code == 200
        assert server.engine.calls[0].prompt_token_ids == ([74, 75] if "hi" not in prompt else tokenizer.encode("hi"))

    async def test_content_in_parts(self, server: Server, client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
        server.will_say("x")
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        await client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
        expected = tokenizer.apply_chat_template([{"role": "user", "content": "one\ntwo"}])
        assert server.engine.calls[0].prompt_token_ids == expected

    async def test_more_messages_than_the_context_has_tokens_are_refused_at_once(self, client: httpx.AsyncClient) -> None:
        messages = [{"role": "user", "content": "a"}] * 65
        response = await client.post(CHAT, json={"messages": messages})
        message = assert_error(response, 400, "context_length_exceeded", "messages")
        assert message == "messages: 65 of them must be fewer than the tokens of the context, 64"

    @pytest.mark.parametrize("name", ["self", "args", "kwargs", "template"])
    async def test_template_variables_may_have_any_name(self, server: Server, client: httpx.AsyncClient, name: str) -> None:
        server.will_say("x")
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: "value"}}
        assert (await client.post(CHAT, json=body)).status_code == 200

    async def test_long_prompt_is_the_same_in_a_thread(
        self, server: Server, client: httpx.AsyncClient, tokenizer: Tokenizer
    ) -> None:
        server.config = ServeConfig()
        transport = httpx.ASGITransport(server.create_app(NOWHERE))
        async with httpx.AsyncClient(transport=transport, base_url="http://stagewire") as client:
            for route, text in ((COMPLETIONS, "word " * 3000), (CHAT, "word " * 3000)):
                fields = {"prompt": text} if route == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
                field = "prompt" if route == COMPLETIONS else "messages"
                message = assert_error(await client.post(route, json=fields), 400, "context_length_exceeded", field)
                num = len(tokenizer.encode(text) if route == COMPLETIONS else tokenizer.apply_chat_template(fields["messages"]))
                assert str(num) in message
                assert "64" in message

    async def test_parameters(self, server: Server, client: httpx.AsyncClient) -> None:
        server.will_say("x")
        asked = {
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 7,
            "min_p": 0.1,
            "seed": 42,
            "max_tokens": 5,
            "stop_token_ids": [9, 11],
            "ignore_eos": True,
            "min_tokens": 2,
            "repetition_penalty": 1.5,
            "presence_penalty": -1.0,
            "frequency_penalty": 0.5,
            "logit_bias": {"5": -100, "31": 2.5},
        }
        assert (await client.post(COMPLETIONS, json={"prompt": "Hi", **asked})).status_code == 200
        params = server.engine.calls[0].params
        got = {name: getattr(params, name) for name in asked}
        assert got == {**asked, "stop_token_ids": frozenset({9, 11}), "logit_bias": {5: -100.0, 31: 2.5}}

    @pytest.mark.parametrize(("given", "used"), [(-1, 0), (0, 0), (2**70, MODEL.vocab_size)])
    async def test_top_k(self, server: Server, client: httpx.AsyncClient, given: int, used: int) -> None:
        server.will_say("x")
        assert (await client.post(COMPLETIONS, json={"prompt": "Hi", "top_k": given})).status_code == 200
        assert server.engine.calls[0].params.top_k == used

    async def test_nulls_and_unknown_fields(self, server: Server, client: httpx.AsyncClient) -> None:
        server.will_say("x")
        nulls = [*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__]
        nulls = [name for name in nulls if name not in ("prompt", "messages")]
        for route in (COMPLETIONS, CHAT):
            fields = body(route, **dict.fromkeys(nulls), user="me", some_new_thing={"a": [1]})
            assert (await client.post(route, json=fields)).status_code == 200
        assert server.engine.calls[0].params.max_tokens == 16
        assert server.engine.calls[0].params.temperature == 1.0

    async def test_harmless_values(self, server: Server, client: httpx.AsyncClient) -> None:
        server.will_say("x")
        harmless = {"n": 1, "best_of": 1, "presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}}
        harmless |= {"logprobs": False, "tools": [], "tool_choice": "none", "repetition_penalty": 1.0, "min_tokens": 0}
        assert (await client.post(CHAT, json=body(CHAT, **harmless))).status_code == 200

    async def test_max_tokens_by_default(self, server: Server, client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
        server.will_say("x")
        await client.post(CHAT, json=body(CHAT))
        await client.post(CHAT, json=body(CHAT, max_tokens=9, max_completion_tokens=3))
        await client.post(COMPLETIONS, json={"prompt": [5] * 60})
        rest = MODEL.max_model_len - len(tokenizer.apply_chat_template(USER))
        assert [call.params.max_tokens for call in server.engine.calls] == [rest, 3, 4]

    async def test_stop_string_ends_the_request(self, server: Server, client: httpx.AsyncClient) -> None:
        server.will_say("one two three", None)
        server.engine.script = [*server.engine.script, asyncio.Event()]  # it would go on for ever
        answer = (await client.post(COMPLETIONS, json={"prompt": "Hi", "stop": [" th", "zz"]})).json()
        assert answer["choices"][0] == {
            "index": 0, "text": "one two", "logprobs": None, "finish_reason": "stop", "stop_reason": " th",
        }  # fmt: skip
        assert server.engine.calls[0].was_aborted
        assert server.finished() == {"stop": 1}

    async def test_stop_is_part_of_the_text_on_request(
        self, server: Server, client: httpx.AsyncClient, tokenizer: Tokenizer
    ) -> None:
        server.will_say("one two three", None)
        fields = {"prompt": "x", "include_stop_str_in_output": True}
        [choice] = (await client.post(COMPLETIONS, json={**fields, "stop": " tw"})).json()["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("one tw", " tw")
        ids = tokenizer.encode("one")
        server.engine.script = [TokenChunk(ids, FinishReason.STOP, ids[-1])]
        [choice] = (await client.post(COMPLETIONS, json={**fields, "stop_token_ids": ids[-1:]})).json()["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("one", ids[-1])

    async def test_stop_token_is_not_shown(self, server: Server, client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
        [a, b] = tokenizer.encode("one two")[:2]
        server.engine.script = [TokenChunk([a]), TokenChunk([b], FinishReason.STOP, stop_token_id=b)]
        answer = (await client.post(COMPLETIONS, json={"prompt": "Hi", "stop_token_ids": [b]})).json()
        assert answer["choices"][0]["text"] == tokenizer.decode([a])
        assert answer["choices"][0]["stop_reason"] == b
        assert answer["usage"]["completion_tokens"] == 2

    async def test_special_tokens_on_request(self, server: Server, client: httpx.AsyncClient) -> None:
        server.will_say("x<|im_end|>")
        texts = [
            (await client.post(COMPLETIONS, json={"prompt": "Hi", "skip_special_tokens": skip})).json()["choices"][0]["text"]
            for skip in (True, False)
        ]
        assert texts == ["x", "x<|im_end|>"]


class TestStreams:
    async def test_completion(self, server: Server, client: httpx.AsyncClient) -> None:
        server.will_say("one 👍🏽 two")
        response = await client.post(COMPLETIONS, json={"prompt": "Hi", "stream": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        *pieces, done = events(response.text)
        assert done == "[DONE]"
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == "one 👍🏽 two"
        assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert len({piece["id"] for piece in pieces}) == 1
        assert not any("usage" in piece for piece in pieces)

    async def test_chat(self, server: Server, client: httpx.AsyncClient) -> None:
        server.will_say("one two")
        options = {"include_usage": True}
        response = await client.post(CHAT, json=body(CHAT, stream=True, stream_options=options))
        first, *middle, last, usage, done = events(response.text)
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["choices"][0]["delta"]["content"] for piece in middle) == "one two"
        assert last["choices"][0]["delta"] == {}
        assert last["choices"][0]["finish_reason"] == "length"
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"]
        assert done == "[DONE]"

    async def test_usage_on_every_chunk(self, server: Server, client: httpx.AsyncClient) -> None:
        server.will_say("abc")
        options = {"continuous_usage_stats": True}
        response = await client.post(COMPLETIONS, json=body(COMPLETIONS, stream=True, stream_options=options))
        counts = [piece["usage"]["completion_tokens"] for piece in events(response.text)[:-1]]
        assert counts == list(range(1, len(counts) + 1))

    @pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
    async def test_failure_in_the_middle(self, server: Server, client: httpx.AsyncClient, route: str) -> None:
        server.will_say("one", None)
        server.engine.script = [*server.engine.script, StageFailed(1, "out of memory")]
        response = await client.post(route, json=body(route, stream=True))
        *pieces, error, done = events(response.text)
        assert error == {
            "error": {"message": "stage 1 failed: out of memory", "type": "server_error", "param": None, "code": "stage_failed"}
        }
        assert done == "[DONE]"
        assert not any(choice["finish_reason"] for piece in pieces for choice in piece["choices"])
        assert server.finished() == {"error": 1}

    @pytest.mark.parametrize("end", [None, FinishReason.ABORT])
    async def test_short_answer_is_an_error(self, server: Server, client: httpx.AsyncClient, end: FinishReason | None) -> None:
        server.will_say("one two", end)
        *_, error, done = events((await client.post(COMPLETIONS, json=body(COMPLETIONS, stream=True))).text)
        assert error["error"]["code"] == "aborted"
        assert done == "[DONE]"
        assert_error(await client.post(COMPLETIONS, json=body(COMPLETIONS)), 503, "aborted")
        assert server.finished() == {"error": 2}

    async def test_bug_is_told_without_its_text(
        self, server: Server, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.will_say("one", None)
        server.engine.script = [*server.engine.script, RuntimeError("/secret/path")]
        response = await client.post(COMPLETIONS, json=body(COMPLETIONS, stream=True))
        assert "secret" not in response.text
        assert events(response.text)[-2]["error"]["code"] == "internal_error"
        assert "/secret/path" in caplog.text

    @pytest.mark.parametrize("stream", [True, False])
    async def test_failure_before_the_first_token(self, server: Server, client: httpx.AsyncClient, stream: bool) -> None:
        server.engine.script = [StageFailed(0, "it broke")]
        response = await client.post(COMPLETIONS, json=body(COMPLETIONS, stream=stream))
        assert_error(response, 500, "stage_failed")
        assert server.finished() == {"error": 1}
        assert server.rejected() == {}


class TestRefusals:
    @pytest.mark.parametrize("stream", [True, False])
    async def test_queue_full(self, server: Server, client: httpx.AsyncClient, stream: bool) -> None:
        server.engine.script = [QueueFull("256 requests wait")]
        response = await client.post(CHAT, json=body(CHAT, stream=stream))
        assert_error(response, 429, "queue_full")
        assert response.headers["retry-after"] == "1"
        assert server.rejected() == {"queue_full": 1}
        assert server.finished() == {}

    async def test_engine_is_not_ready(self, server: Server, client: httpx.AsyncClient) -> None:
        server.engine.script = [NotReady("draining")]
        response = await client.post(CHAT, json=body(CHAT))
        assert_error(response, 503, "not_ready")
        assert response.headers["retry-after"] == "2"
        assert server.rejected() == {"not_ready": 1}

    @pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.DRAINING, EngineState.FAILED])
    async def test_state(self, server: Server, client: httpx.AsyncClient, state: EngineState) -> None:
        server.engine.state = state
        response = await client.post(CHAT, json=body(CHAT))
        assert state in assert_error(response, 503, "not_ready")
        assert "retry-after" in response.headers
        assert server.engine.calls == []

    async def test_before_the_model_is_known(self, server: Server, client: httpx.AsyncClient) -> None:
        server.engine.state, server.engine.served_model, server.tokenizer = EngineState.STARTING, None, None
        for response in (await client.post(CHAT, json=body(CHAT)), await client.get("/v1/models")):
            assert_error(response, 503, "not_ready")
            assert "retry-after" in response.headers

    async def test_engine_refuses_a_value(self, server: Server, client: httpx.AsyncClient) -> None:
        server.engine.script = [ConfigError("prompt: needs more KV blocks than there are")]
        assert_error(await client.post(COMPLETIONS, json=body(COMPLETIONS)), 400, "invalid_value", "prompt")
        assert server.rejected() == {"invalid": 1}

    @pytest.mark.parametrize(
        ("field", "value", "said"),
        [
            ("max_tokens", -3, "max_tokens -3: must be at least 1"),
            ("max_tokens", 0, "max_tokens 0: must be at least 1"),
            ("temperature", -1, "temperature -1.0: must be between 0 and 100"),
            ("top_p", 0, "top_p 0.0: must be above 0 and at most 1"),
            ("top_k", -2, "top_k -2: must be at least 0"),
            ("min_p", 2, "min_p 2.0: must be between 0 and 1"),
            ("seed", 2**64, f"seed {2**64}: must fit in 64 bits"),
            ("stop", [""], "stop: every string must have between 1 and 256 characters"),
            ("stop", ["a"] * 17, "stop: 17 strings given, must be at most 16"),
            ("stop_token_ids", [400], "stop_token_ids: 400 is not a token id; must be between 0 and 399"),
            ("stop_token_ids", [1] * 129, "stop_token_ids: 129 given, must be at most 128"),
            ("n", 0, "n 0: must be between 1 and 128"),
            ("n", 129, "n 129: must be between 1 and 128"),
            ("min_tokens", -1, "min_tokens -1: must be between 0 and max_tokens"),
            ("min_tokens", 70, "min_tokens 70: must be between 0 and max_tokens"),
            ("repetition_penalty", 0, "repetition_penalty 0.0: must be above 0 and at most 100"),
            ("presence_penalty", 3, "presence_penalty 3.0: must be between -2 and 2"),
            ("frequency_penalty", -2.5, "frequency_penalty -2.5: must be between -2 and 2"),
            ("logit_bias", {"400": 1}, "logit_bias: '400' is not a token id; must be between 0 and 399"),
            ("logit_bias", {"1_0": 1}, "logit_bias: '1_0' is not a token id; must be between 0 and 399"),
            ("logit_bias", {"5": 101}, "logit_bias 101.0: of token 5 must be between -100 and 100"),
            ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias: 1025 tokens given, must be at most 1024"),
        ],
    )
    @pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
    async def test_values(
        self, server: Server, client: httpx.AsyncClient, route: str, field: str, value: object, said: str
    ) -> None:
        response = await client.post(route, json=body(route, **{field: value}))
        assert assert_error(response, 400, "invalid_value", field).startswith(said)
        assert server.engine.calls == []
        assert server.rejected() == {"invalid": 1}

    async def test_max_completion_tokens(self, client: httpx.AsyncClient) -> None:
        response = await client.post(CHAT, json=body(CHAT, max_completion_tokens=-1, max_tokens=5))
        message = assert_error(response, 400, "invalid_value", "max_completion_tokens")
        assert message == "max_completion_tokens -1: must be at least 1"

    async def test_context_length(self, client: httpx.AsyncClient) -> None:
        response = await client.post(COMPLETIONS, json={"prompt": [5] * 60, "max_tokens": 5})
        message = assert_error(response, 400, "context_length_exceeded", "max_tokens")
        assert message == "max_tokens 5: with the prompt's 60 tokens must be at most the context length, 64"
        response = await client.post(COMPLETIONS, json={"prompt": [5] * 64})
        message = assert_error(response, 400, "context_length_exceeded", "prompt")
        assert message == "prompt: 64 tokens must be below the context length, 64"

    @pytest.mark.parametrize(
        ("prompt", "said"),
        [
            (None, "prompt: must be given"),
            ("", "prompt: must have at least one token"),
            ([], "prompt: must have at least one token"),
            ([[]], "prompt: must have at least one token"),
            ([[1], []], "prompt[1]: must have at least one token"),
            ([[1], "a", 5], "prompt[2]: must be text or a list of token ids"),
            (["a", [400]], "prompt[1]: 400 is not a token id; must be between 0 and 399"),
            ([[1]] * 300, "prompt: 300 prompts with n 1 each must be at most 256 answers in all (--max-queue)"),
            ([1, "a"], "prompt: a value of type str is not a token id"),
            ([1, True], "prompt: a value of type bool is not a token id"),
            ([-1], "prompt: -1 is not a token id; must be between 0 and 399"),
            ([10**30], "prompt: a value of type int is not a token id"),
            ([{"a": 1}], "prompt: a value of type dict is not a token id"),
        ],
    )
    async def test_prompts(self, client: httpx.AsyncClient, prompt: object, said: str) -> None:
        response = await client.post(COMPLETIONS, json={"prompt": prompt})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == said.partition(":")[0]
        assert response.json()["error"]["message"].startswith(said)

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            (None, "messages"),
            ([], "messages"),
            ([{"content": "x"}], "messages[0].role"),
            ([*USER, {"role": "user", "content": 5}], "messages[1].content"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ],
    )
    async def test_messages(self, client: httpx.AsyncClient, messages: object, param: str) -> None:
        response = await client.post(CHAT, json={"messages": messages})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param

    async def test_template_refuses(self, server: Server, client: httpx.AsyncClient, tmp_path: Path) -> None:
        server.tokenizer = Tokenizer.from_directory(
            write_tokenizer(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
        )
        response = await client.post(CHAT, json=body(CHAT))
        assert "roles must alternate" in assert_error(response, 400, "invalid_value", "messages")

    @pytest.mark.parametrize(
        ("route", "field", "value"),
        [
            (COMPLETIONS, "best_of", 2),
            (COMPLETIONS, "suffix", "x"),
            (COMPLETIONS, "top_logprobs", 3),
            (COMPLETIONS, "prompt_logprobs", 3),
            (CHAT, "echo", True),
            (CHAT, "tools", [{"type": "function"}]),
            (CHAT, "tool_choice", "required"),
            (CHAT, "response_format", {"type": "json_object"}),
        ],
    )
    async def test_unsupported(self, client: httpx.AsyncClient, route: str, field: str, value: object) -> None:
        response = await client.post(route, json=body(route, **{field: value}))
        assert_error(response, 400, "unsupported_parameter", field)

    @pytest.mark.parametrize(
        ("content", "code", "param"),
        [
            (b"{", "invalid_json", None),
            (b"", "invalid_json", None),
            (b'{"prompt": "\xff"}', "invalid_json", None),
            (b'{"prompt": "\\ud800"}', "invalid_json", None),
            (b'{"temperature": NaN}', "invalid_json", None),
            (b'{"prompt": ' + b"[" * 4000, "invalid_json", None),
            (b'{"prompt": "a", "x": ' + b"[" * 2000 + b"]" * 2000 + b"}", "invalid_json", None),
            (b"[]", "invalid_type", None),
            (b'{"prompt": "x", "max_tokens": "' + b"9" * 3000 + b'"}', "invalid_type", "max_tokens"),
            (b'{"prompt": "x", "stream_options": {"include_usage": 1}}', "invalid_type", "stream_options.include_usage"),
        ],
    )
    async def test_malformed_bodies(self, client: httpx.AsyncClient, content: bytes, code: str, param: str | None) -> None:
        response = await client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
        message = assert_error(response, 400, code, param)
        assert "99" not in message

    async def test_unknown_model(self, client: httpx.AsyncClient) -> None:
        response = await client.post(COMPLETIONS, json={"model": "other", "prompt": "x"})
        assert_error(response, 404, "model_not_found", "model")

    async def test_media_type(self, client: httpx.AsyncClient) -> None:
        response = await client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
        assert_error(response, 415, "unsupported_media_type")

    async def test_large_body(self, server: Server, client: httpx.AsyncClient) -> None:
        response = await client.post(COMPLETIONS, json={"prompt": "x" * 20000})
        assert "16384" in assert_error(response, 413, "body_too_large")

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 1000

        response = await client.post(COMPLETIONS, content=pieces(), headers={"content-type": "application/json"})
        assert_error(response, 413, "body_too_large")
        assert server.rejected() == {"invalid": 2}

    @pytest.mark.parametrize("path", ["/", "/v1/responses", "/v1/embeddings", "/v1/completions/"])
    async def test_unknown_path(self, client: httpx.AsyncClient, path: str) -> None:
        assert "/v1/completions" in assert_error(await client.post(path, json={}), 404, "not_found")

    async def test_wrong_method(self, client: httpx.AsyncClient) -> None:
        for method, path, allowed in (("GET", COMPLETIONS, {"POST"}), ("POST", "/health", {"GET", "HEAD"})):
            response = await client.request(method, path)
            assert_error(response, 405, "method_not_allowed")
            assert set(response.headers["allow"].split(", ")) == allowed


class TestTokens:
    async def test_text_and_back(self, client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
        text = "The quick 🦊"
        answer = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        ids = tokenizer.encode(text)
        assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), MODEL.max_model_len)
        assert len(answer["token_strs"]) == len(ids)
        plain = (await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
        assert plain["tokens"] == tokenizer.encode(text, add_special_tokens=False)
        assert plain["token_strs"] is None
        assert (await client.post("/detokenize", json={"tokens": plain["tokens"]})).json() == {"prompt": text}

    async def test_messages(self, client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
        for add in (True, False):
            answer = (await client.post("/tokenize", json={"messages": USER, "add_generation_prompt": add})).json()
            assert answer["tokens"] == tokenizer.apply_chat_template(USER, add)

    @pytest.mark.parametrize(
        ("path", "content", "code", "param"),
        [
            ("/tokenize", {}, "missing_required_parameter", "prompt"),
            ("/tokenize", {"prompt": "a", "messages": USER}, "invalid_value", "messages"),
            ("/tokenize", {"prompt": 3}, "invalid_type", "prompt"),
            ("/detokenize", {}, "missing_required_parameter", "tokens"),
            ("/detokenize", {"tokens": [400]}, "invalid_value", "tokens"),
            ("/detokenize", {"tokens": [True]}, "invalid_value", "tokens"),
        ],
    )
    async def test_bad_values(
        self, client: httpx.AsyncClient, path: str, content: dict[str, Any], code: str, param: str
    ) -> None:
        assert_error(await client.post(path, json=content), 400, code, param)


class TestApiKey:
    @pytest.fixture
    def server(self, tokenizer: Tokenizer, tmp_path: Path) -> Server:
        (tmp_path / "keys").write_text("third\n\n")
        server = Server(tokenizer)
        server.config = ServeConfig(api_key=("first", "second"), api_key_file=str(tmp_path / "keys"))
        server.app = server.create_app(NOWHERE)
        return server

    @pytest.mark.parametrize("given", [None, "Bearer", "Bearer ", "Bearer firs", "Bearer first2", "Basic first", "first"])
    async def test_without_a_key(self, client: httpx.AsyncClient, server: Server, given: str | None) -> None:
        headers = {} if given is None else {"authorization": given}
        paths = (COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/models", "/load", "/server_info", "/version", "/nowhere")
        for path in paths:
            response = await client.post(path, json={"prompt": "x"}, headers=headers)
            assert_error(response, 401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
        assert server.engine.calls == []

    @pytest.mark.parametrize("given", ["Bearer first", "Bearer second", "bearer third"])
    async def test_with_a_key(self, client: httpx.AsyncClient, given: str) -> None:
        assert (await client.get("/v1/models", headers={"authorization": given})).status_code == 200

    async def test_probes_are_open(self, client: httpx.AsyncClient) -> None:
        for path in ("/health", "/livez", "/readyz", "/ping"):
            assert (await client.get(path)).status_code == 200

    async def test_server_info_hides_the_keys(self, client: httpx.AsyncClient) -> None:
        response = await client.get("/server_info", headers={"authorization": "Bearer first"})
        info = response.json()
        assert info["model"] == {"name": "small", "max_model_len": 64, "vocab_size": 400}
        assert info["config"]["api_key"] == "(hidden)"
        assert info["config"]["max_num_seqs"] == 64
        assert "first" not in response.text

    @pytest.mark.parametrize("content", [None, "", "two words", "é"])
    async def test_file_of_keys(self, server: Server, tmp_path: Path, content: str | None) -> None:
        file = tmp_path / "bad"
        if content is not None:
            file.write_text(content)
        server.config = ServeConfig(api_key_file=str(file))
        with pytest.raises(ConfigError, match=r"--api-key-file .*bad: must"):
            server.create_app(NOWHERE)


class TestDocuments:
    async def test_every_route_is_described(self, server: Server, client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json")).json()
        described = {path.replace("{model}", "{name:path}") for path in document["paths"]}
        routes = {route.path for route in server.app.routes if isinstance(route, Route)}
        assert routes - described == {"/metrics", "/openapi.json", "/docs"}
        assert described <= routes
        fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
        assert {"prompt", "echo", "max_tokens", "stop_token_ids"} <= set(fields)

    async def test_page_loads_nothing(self, client: httpx.AsyncClient) -> None:
        page = await client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "POST /v1/chat/completions" in page.text
        assert "://" not in page.text
        assert "src=" not in page.text


async def test_load(server: Server, client: httpx.AsyncClient) -> None:
    server.engine.num_running, server.engine.num_waiting = 3, 2
    assert (await client.get("/load")).json() == {"num_running": 3, "num_waiting": 2, "server_load": 5}


class TestRequestId:
    @pytest.mark.parametrize("path", ["/livez", "/nowhere", "/v1/models/x"])
    async def test_is_returned_everywhere(self, client: httpx.AsyncClient, path: str) -> None:
        assert (await client.get(path, headers={"x-request-id": "mine-1"})).headers["x-request-id"] == "mine-1"

    @pytest.mark.parametrize("bad", ["", "x" * 129, "a b", "ü"])
    async def test_bad_ones_are_replaced(self, client: httpx.AsyncClient, bad: str) -> None:
        got = (await client.get("/livez", headers=[(b"x-request-id", bad.encode())])).headers["x-request-id"]
        assert got != bad
        assert len(got) == 32

    async def test_the_engine_gets_a_unique_one(self, server: Server, client: httpx.AsyncClient) -> None:
        server.will_say("x")
        for _ in range(2):
            answer = (await client.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": "same"})).json()
            assert answer["id"] == "cmpl-" + server.engine.calls[-1].request_id
        first, second = (call.request_id for call in server.engine.calls)
        assert first != second
        assert first.startswith("same-")


class TestProbes:
    async def test_ready(self, server: Server, client: httpx.AsyncClient) -> None:
        for state in EngineState:
            server.engine.state = state
            for path in ("/readyz", "/health"):
                response = await client.get(path)
                assert response.status_code == (200 if state is EngineState.READY else 503)
                assert response.json()["status"] == state
            assert (await client.get("/livez")).status_code == 200

    async def test_version(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/version")).json() == {"version": __version__}

    async def test_models(self, client: httpx.AsyncClient) -> None:
        [card] = (await client.get("/v1/models")).json()["data"]
        assert card["id"] == card["root"] == "small"
        assert (card["owned_by"], card["max_model_len"], card["created"]) == ("stagewire", 64, 1700000000)
        assert (await client.get("/v1/models/small")).json() == card
        assert_error(await client.get("/v1/models/or/g"), 404, "model_not_found")

    async def test_metrics_are_the_exporter_s(self, server: Server) -> None:
        asked: list[tuple[str, str | None]] = []

        async def answer(request: Request) -> Response:
            asked.append((request.method, request.headers.get("accept")))
            return Response("a_metric 1\n", headers={"content-type": "text/plain; version=7", "x-other": "1"})

        app = Starlette(routes=[Route("/metrics", answer)])
        async with serving(app) as exporter, asgi_client(server.create_app(exporter)) as client:
            for accept in ("application/openmetrics-text; version=1.0.0", "abc"):
                response = await client.get("/metrics", headers={"accept": accept})
                assert (response.status_code, response.text) == (200, "a_metric 1\n")
                assert response.headers["content-type"] == "text/plain; version=7"
                assert "x-other" not in response.headers
                assert asked.pop() == ("GET", accept)
            assert (await client.head("/metrics")).status_code == 200

    async def test_metrics_without_an_exporter(self, client: httpx.AsyncClient) -> None:
        response = await client.get("/metrics")
        message = assert_error(response, 503, "exporter_unavailable")
        assert "127.0.0.1:9 does not answer" in message
        assert response.headers["retry-after"] == "1"

    async def test_counts_and_latencies(self, server: Server, client: httpx.AsyncClient) -> None:
        server.engine.script = chunks([5, 6, 7])
        await client.post(COMPLETIONS, json={"prompt": [1, 2]})
        assert server.finished() == {"length": 1}
        assert server.value("prompt_tokens_total") == 2
        assert server.value("generated_tokens_total") == 3
        assert server.value("time_to_first_token_seconds_count") == 1
        assert server.value("inter_token_latency_seconds_count") == 2
        assert server.value("e2e_request_latency_seconds_count") == 1
        assert server.value("time_per_output_token_seconds_count") == 1
        phases = sum(server.value("request_phase_seconds_sum", phase) for phase in ("queue", "prefill", "decode"))
        assert phases == pytest.approx(server.value("e2e_request_latency_seconds_sum"))
        assert server.value("detokenize_seconds_count") == 3


class TestOverASocket:
    async def test_tokens_come_one_by_one(self, server: Server, real_client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
        first, second = tokenizer.encode("one two")[:2]
        gate = asyncio.Event()
        server.engine.script = [TokenChunk([first]), gate, TokenChunk([second], FinishReason.LENGTH)]
        async with real_client.stream("POST", COMPLETIONS, json=body(COMPLETIONS, stream=True)) as response:
            lines = response.aiter_lines()
            assert tokenizer.decode([first]) in await anext(lines)
            gate.set()  # the second token is made only now
            rest = [line async for line in lines if line]
        assert len(rest) == 2
        assert rest[-1] == "data: [DONE]"

    async def test_client_leaves_a_stream(self, server: Server, real_client: httpx.AsyncClient) -> None:
        server.will_say("one", None)
        server.engine.script = [*server.engine.script, asyncio.Event()]
        async with real_client.stream("POST", CHAT, json=body(CHAT, stream=True)) as response:
            await anext(response.aiter_lines())
        [call] = server.engine.calls
        async with asyncio.timeout(5):
            await call.has_ended.wait()
        assert call.was_aborted
        assert server.finished() == {"abort": 1}

    @pytest.mark.parametrize("stream", [True, False])
    async def test_client_leaves_before_the_first_token(
        self, server: Server, real_client: httpx.AsyncClient, stream: bool
    ) -> None:
        server.engine.script = [asyncio.Event()]
        asking = asyncio.create_task(real_client.post(COMPLETIONS, json=body(COMPLETIONS, stream=stream)))
        async with asyncio.timeout(5):
            await server.engine.was_called.wait()
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            [call] = server.engine.calls
            await call.has_ended.wait()
        assert call.was_aborted
        assert server.finished() == {"abort": 1}

    async def test_stop_string_in_a_stream_frees_the_engine(self, server: Server, real_client: httpx.AsyncClient) -> None:
        server.will_say("one two three", None)
        server.engine.script = [*server.engine.script, asyncio.Event()]
        response = await real_client.post(COMPLETIONS, json=body(COMPLETIONS, stream=True, stop=" two"))
        *pieces, done = events(response.text)
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == "one"
        assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
        assert done == "[DONE]"
        assert server.engine.calls[0].was_aborted

    async def test_connection_is_kept_and_head_has_no_body(self, server: Server, real_client: httpx.AsyncClient) -> None:
        server.will_say("x")
        for _ in range(3):
            assert (await real_client.post(COMPLETIONS, json=body(COMPLETIONS))).status_code == 200
        response = await real_client.head("/health")
        assert response.status_code == 200
        assert response.content == b""
