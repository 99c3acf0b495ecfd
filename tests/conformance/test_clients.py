"""Clients from their own packages against a running worker, each as its users call it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from stages.model.source import ModelSource
from tests.integration.worker import Worker

# litellm, langchain and schemathesis warn of their own dependencies; what is tested here is our answers.
pytestmark = [pytest.mark.alone, pytest.mark.filterwarnings("ignore")]

KEY = "conformance-key"
FRANCE = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
MESSAGES = [{"role": "user", "content": FRANCE}]


@pytest.fixture(scope="module")
def worker(smollm2: ModelSource) -> Iterator[Worker]:
    running = Worker("--dtype", "float32", "--api-key", KEY).wait_ready()
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


class TestOpenAI:
    def test_models(self, client: openai.OpenAI, model: str) -> None:
        assert client.models.retrieve(model).id == model
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("other")
        assert caught.value.code == "model_not_found"

    def test_chat(self, client: openai.OpenAI, model: str) -> None:
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, temperature=0, max_completion_tokens=20, logprobs=True, top_logprobs=2,
            extra_headers={"x-request-id": "mine"},
        )  # fmt: skip
        assert answer._request_id == "mine"
        [choice] = answer.choices
        assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
        told = choice.logprobs.content
        assert bytes(byte for token in told for byte in token.bytes).decode().startswith(ANSWER)
        assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in told)

    def test_stream(self, client: openai.OpenAI, model: str) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(
            client.chat.completions.create(
                model=model, messages=MESSAGES, temperature=0, max_tokens=20, stream=True, stream_options=options
            )
        )
        *pieces, last = chunks
        assert last.choices == []
        assert last.usage.completion_tokens == 8
        assert all(piece.usage is not None for piece in pieces)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == ANSWER
        assert pieces[0].choices[0].delta.role == "assistant"
        assert pieces[-1].choices[0].finish_reason == "stop"

    def test_scoring(self, client: openai.OpenAI, model: str) -> None:
        """As lm-eval asks: a list of token-id lists, echoed, with their log-probabilities."""
        prompts = [[504, 3575, 282, 4649, 314], [28, 504]]
        for max_tokens in (0, 1):
            answer = client.completions.create(
                model=model, prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234
            )
            for choice, prompt in zip(answer.choices, prompts, strict=True):
                assert choice.logprobs.token_logprobs[0] is None
                assert len(choice.logprobs.tokens) == len(prompt) + max_tokens == len(choice.logprobs.text_offset)
                assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])

    def test_errors(self, client: openai.OpenAI, model: str) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=model, messages=MESSAGES, tools=[{"type": "function"}])
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
        with pytest.raises(openai.AuthenticationError) as refused:
            client.with_options(api_key="wrong").models.list()
        assert refused.value.code == "invalid_api_key"

    def test_closing_a_stream_frees_the_worker(self, client: openai.OpenAI, model: str) -> None:
        stream = client.completions.create(
            model=model, prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        for _ in range(200):
            load = client.get("/load".replace("/", "/../", 1), cast_to=object)
            if load["server_load"] == 0:
                return
        pytest.fail(f"the request is still there: {load}")


def test_langchain(worker: Worker, model: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    chat = ChatOpenAI(base_url=f"{worker.url}/v1", api_key=KEY, model=model, temperature=0, max_completion_tokens=20)
    assert chat.invoke(FRANCE).content == ANSWER
    assert "".join(chunk.content for chunk in chat.stream(FRANCE)) == ANSWER
    text = OpenAI(base_url=f"{worker.url}/v1", api_key=KEY, model=model, temperature=0, max_tokens=5)
    answers = text.generate(["1, 2, 3, 4,", "a, b, c, d,"]).generations
    assert [one[0].text.split(",")[0].strip() for one in answers] == ["5", "e"]


def test_litellm(worker: Worker, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    answer = litellm.completion(
        f"hosted_vllm/{model}", MESSAGES, api_base=f"{worker.url}/v1", api_key=KEY, temperature=0, max_tokens=20
    )
    assert answer.choices[0].message.content == ANSWER


def test_llm(worker: Worker, model: str, tmp_path: Path) -> None:
    lines = ["- model_id: ours", f"  model_name: {model}", f"  api_base: {worker.url}/v1", "  api_key_name: ours"]
    (tmp_path / "extra-openai-models.yaml").write_text("\n".join(lines))
    command = [sys.executable, "-m", "llm", "-m", "ours", "--key", KEY, "-o", "temperature", "0", "-o", "max_tokens", "20"]
    environ = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    found = subprocess.run([*command, FRANCE], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout.strip() == ANSWER, found.stderr


def test_schemathesis(worker: Worker) -> None:
    """Requests made from the OpenAPI file, good and bad: none is a server error, and every answer is as described."""
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{worker.url}/openapi.json",
        "-H",
        f"Authorization: Bearer {KEY}",
    ]
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
    )
    options = [
        "--max-examples",
        "5",
        "--phases",
        "examples,coverage",
        "--checks",
        checks,
        "--seed",
        "1",
        "--exclude-path-regex",
        "completions",
    ]
    found = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
