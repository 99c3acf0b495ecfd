import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from orchestrator.detokenizer import IncrementalDetokenizer, TextStream
from orchestrator.tokenizer import Tokenizer
from stages.errors import ConfigError
from tests.orchestrator.small_tokenizer import SPECIAL, write_tokenizer

ODD_TEXTS = [
    "",
    " ",
    "\n\n\t x  y ",
    "naïve café – 你好 👍🏽 👩‍👩‍👧‍👦",
    "<|im_start|>user\nhi<|im_end|>",
    "<|endoftext|>twice<|endoftext|>",
    "x <tool call> y日本z",
    "\ufffd \u200b \x00 \x7f",
    "a" * 300,
    "for (int i=0;i<10;++i){}\r\n",
    "مرحبا שלום हिन्दी ไทย",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """Like Llama 2's and Mistral's: pieces with U+2581 for spaces, and one token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁fox", "x", "ab", "中"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {}, None)


def streamed(tokenizer: Tokenizer, token_ids: list[int], **options: object) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)  # type: ignore[arg-type]
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


class TestLikeTransformers:
    @pytest.mark.parametrize(
        "config", [{}, {"adds_bos": True}, {"add_bos_token": True}, {"adds_bos": True, "add_bos_token": False}]
    )
    def test_ids_and_text_are_equal(self, tmp_path: Path, config: dict[str, bool]) -> None:
        directory = write_tokenizer(tmp_path, **config)
        self.assert_equal_to_transformers(directory)

    def test_of_smollm2(self, smollm2) -> None:
        self.assert_equal_to_transformers(smollm2.path)

    def assert_equal_to_transformers(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        theirs, ours = AutoTokenizer.from_pretrained(directory), Tokenizer.from_directory(directory)
        for text in ODD_TEXTS:
            for add_special_tokens in (True, False):
                ids = theirs.encode(text, add_special_tokens=add_special_tokens)
                assert ours.encode(text, add_special_tokens=add_special_tokens) == ids
                for skip in (True, False):
                    assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
                    assert "".join(streamed(ours, ids, skip_special_tokens=skip)) == ours.decode(ids, skip)
        for messages in (
            [{"role": "user", "content": "Hi <|im_end|> there"}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}],
        ):
            for add_generation_prompt in (True, False):
                expected = theirs.apply_chat_template(
                    messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
                )
                assert ours.apply_chat_template(messages, add_generation_prompt) == expected


class TestLoading:
    def test_settings_of_training_do_not_cut_or_pad_prompts(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer.from_file(str(write_tokenizer(tmp_path) / "tokenizer.json"))
        backend.enable_truncation(4)
        backend.enable_padding(length=8)
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer.from_directory(tmp_path)
        text = "The quick brown fox jumps over the lazy dog."
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_named_special_tokens_are_special(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, pad_token="日本")
        tokenizer = Tokenizer.from_directory(tmp_path)
        ids = tokenizer.encode("a日本b")
        assert tokenizer.decode(ids) == "ab" == "".join(streamed(tokenizer, ids))

    def test_special_tokens_map_is_read(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, chat_template="{{ pad_token }}{{ eos_token }}")
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|endoftext|>", "eos_token": "no"}))
        rendered = Tokenizer.from_directory(tmp_path).render_chat_template([])
        assert rendered == "<|endoftext|><|im_end|>"  # the newer file wins

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"tokenizer\.json: not found"):
            Tokenizer.from_directory(tmp_path)

    def test_malformed_files(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: must be JSON"):
            Tokenizer.from_directory(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("[]")
        with pytest.raises(ConfigError, match="must hold a JSON object"):
            Tokenizer.from_directory(tmp_path)
        write_tokenizer(tmp_path)
        (tmp_path / "tokenizer.json").write_text('{"model": 1}')
        with pytest.raises(ConfigError, match=r"not a tokenizer\.json that can be read"):
            Tokenizer.from_directory(tmp_path)

    def test_loads_no_torch(self, directory: Path) -> None:
        code = (
            "import sys; from pathlib import Path; from orchestrator.tokenizer import Tokenizer;"
            "Tokenizer.from_directory(Path(sys.argv[1])).encode('x');"
            "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
        )
        subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=60)


class TestChatTemplate:
    def with_template(self, tmp_path: Path, template: object) -> Tokenizer:
        return Tokenizer.from_directory(write_tokenizer(tmp_path, chat_template=template))

    def test_file_wins_over_config(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path)
        (tmp_path / "chat_template.jinja").write_text("from the file")
        assert Tokenizer.from_directory(tmp_path).render_chat_template([]) == "from the file"

    def test_default_of_several(self, tmp_path: Path) -> None:
        templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
        assert self.with_template(tmp_path, templates).render_chat_template([]) == "plain"

    def test_whitespace_and_helpers(self, tmp_path: Path) -> None:
        template = (
            "{% for m in messages %}\n  {% if loop.index0 == 1 %}{% break %}{% endif %}\n"
            "{{ m | tojson }}{% generation %}<{{ m.content }}>{% endgeneration %}\n{% endfor %}\n"
            "{{ strftime_now('%Y') | length }}"
        )
        rendered = self.with_template(tmp_path, template).render_chat_template([{"content": "a'é<b>"}] * 2)
        assert rendered == '{"content": "a\'é<b>"}<a\'é<b>>4'

    def test_variables(self, tmp_path: Path) -> None:
        tokenizer = self.with_template(tmp_path, "{{ mood }}{{ tools is none }}{{ bos_token }}")
        assert tokenizer.render_chat_template([], mood="calm") == "calmTrue<|endoftext|>"

    @pytest.mark.parametrize(
        ("template", "cause"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[0].content + 1 }}", "TypeError"),
            ("{{ messages.append(1) }}", "unsafe"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ],
    )
    def test_refusals(self, tmp_path: Path, template: str, cause: str) -> None:
        with pytest.raises(ConfigError, match=f"^messages: the model's chat template refused them: .*{cause}") as caught:
            self.with_template(tmp_path, template).apply_chat_template([{"role": "user", "content": "x"}])
        assert "\n" not in str(caught.value)

    def test_none(self, tmp_path: Path) -> None:
        tokenizer = self.with_template(tmp_path, None)
        assert not tokenizer.has_chat_template
        with pytest.raises(ConfigError, match="messages: the model has no chat template"):
            tokenizer.apply_chat_template([])

    def test_malformed(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="chat template cannot be read"):
            self.with_template(tmp_path, "{% for %}")

    def test_special_tokens_come_from_the_template_alone(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path, adds_bos=True))
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
        assert tokenizer.encode("x")[0] == SPECIAL.index("<|endoftext|>") != ids[0]


class TestStreaming:
    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_deltas_add_up_for_any_tokens(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        size = tokenizer.backend.get_vocab_size()
        ids = data.draw(st.lists(st.integers(0, size + 3), max_size=40))
        skip = data.draw(st.booleans())
        known = [token_id for token_id in ids if token_id < size]
        assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(known, skip)

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(max_size=40))
    def test_deltas_add_up_for_any_text(self, tokenizer: Tokenizer, text: str) -> None:
        deltas = streamed(tokenizer, tokenizer.encode(text))
        assert "".join(deltas) == tokenizer.decode(tokenizer.encode(text))
        if "\ufffd" not in text:
            assert not any("\ufffd" in delta for delta in deltas)

    def test_character_comes_whole_with_its_last_byte(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.backend.get_vocab()
        emoji = [vocab[char] for char in ("ð", "Ł", "ĳ", "į")]  # F0 9F 91 8D, a thumb up
        assert streamed(tokenizer, emoji) == ["", "", "", "👍", ""]
        assert streamed(tokenizer, emoji[:3]) == ["", "", "", "\ufffd"]

    def test_special_tokens_do_not_part_a_character(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.backend.get_vocab()
        ids = [vocab["Ã"], vocab["<|im_end|>"], vocab["©"]]
        assert streamed(tokenizer, ids) == ["", "", "é", ""]

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(alphabet="the fox xab中é👍", max_size=30))
    def test_deltas_add_up_with_byte_fallback(self, byte_fallback: Tokenizer, text: str) -> None:
        ids = byte_fallback.encode(text)
        deltas = streamed(byte_fallback, ids)
        assert "".join(deltas) == byte_fallback.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)

    def test_byte_fallback_does_not_hold_back_garbage_for_ever(self, byte_fallback: Tokenizer) -> None:
        detokenizer = byte_fallback.detokenizer()
        held = 0
        for _ in range(100):
            held = 0 if detokenizer.push([3 + 0xFF]) else held + 1
            assert held < 8


class Letters(TextStream):
    """Code points as tokens."""

    def push(self, token_ids) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The rule, written down plainly: text grows by one character at a time until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        complete = [one for one in stop if text[:end].endswith(one)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


class TestStopStrings:
    @settings(max_examples=500, deadline=None)
    @given(
        pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
        stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
    )
    def test_cut_does_not_depend_on_the_tokens(self, pieces: list[str], stop: list[str]) -> None:
        detokenizer = IncrementalDetokenizer(Letters(), stop)
        text = "".join([*(detokenizer.push(map(ord, piece)) for piece in pieces), detokenizer.flush()])
        assert (text, detokenizer.stopped_by) == first_stop("".join(pieces), stop)

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(alphabet="ab", max_size=20), stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=2))
    def test_only_what_could_be_a_stop_string_is_held_back(self, text: str, stop: list[str]) -> None:
        detokenizer = IncrementalDetokenizer(Letters(), stop)
        told = ""
        for i, char in enumerate(text):
            told += detokenizer.push([ord(char)])
            if detokenizer.stopped_by is None:
                held = text[len(told) : i + 1]
                assert held == "" or any(one.startswith(held) for one in stop)

    def test_nothing_comes_after_the_stop(self) -> None:
        detokenizer = IncrementalDetokenizer(Letters(), ["."])
        assert detokenizer.push(map(ord, "a.b")) == "a"
        assert detokenizer.push(map(ord, "c")) == ""
        assert detokenizer.flush() == ""
        assert detokenizer.stopped_by == "."

    def test_held_text_comes_at_the_end(self) -> None:
        detokenizer = IncrementalDetokenizer(Letters(), ["STOP"])
        assert detokenizer.push(map(ord, "x STO")) == "x "
        assert detokenizer.flush() == "STO"
        assert detokenizer.stopped_by is None

    def test_over_tokens(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("one two three")
        assert "".join(streamed(tokenizer, ids, stop=["o t"])) == "one tw"

    def test_the_first_tokens_are_not_searched(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("one two one two")
        stop = tokenizer.decode(ids[:1])

        def text(num_exempt_tokens: int) -> tuple[str, str | None]:
            detokenizer = tokenizer.detokenizer([stop], num_exempt_tokens=num_exempt_tokens)
            return "".join([detokenizer.push([token_id]) for token_id in ids] + [detokenizer.flush()]), detokenizer.stopped_by

        assert text(0) == ("", stop)
        assert text(1)[0].startswith(stop)
        assert text(1)[1] == stop
        assert text(len(ids)) == ("one two one two", None)
        at_once = tokenizer.detokenizer([stop], num_exempt_tokens=1)
        assert at_once.push(ids) + at_once.flush() == text(1)[0]


class TestTokenBytes:
    def test_they_add_up_to_the_text(self, tokenizer: Tokenizer) -> None:
        for text in ODD_TEXTS:
            assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text

    def test_of_byte_fallback(self, byte_fallback: Tokenizer) -> None:
        ids = byte_fallback.encode("the fox 中 é", add_special_tokens=False)
        assert b"".join(map(byte_fallback.token_bytes, ids)).decode() == " the fox 中 é"
        assert byte_fallback.token_bytes(1) == b"<s>"

    def test_past_the_vocabulary(self, tokenizer: Tokenizer, byte_fallback: Tokenizer) -> None:
        assert tokenizer.token_bytes(100_000) == byte_fallback.token_bytes(100_000) == b""
