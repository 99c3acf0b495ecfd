"""Chat templates written the way the families write theirs, rendered as ``transformers`` renders them."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.tokenizer import Tokenizer
from stages.errors import ConfigError
from tests.orchestrator.small_tokenizer import write_tokenizer

SYSTEM = {"role": "system", "content": "  Be brief. "}
USER = {"role": "user", "content": "Say 'hi' & <b>é</b>\n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhi"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"b": 2, "a": [1, "x'é"]}}}],
}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ASSISTANT, {"role": "user", "content": ""}],
    [USER, CALL, {"role": "tool", "content": '{"sum": 3}'}, ASSISTANT],
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {"z": 1, "a": 2}}}]

# Headers around roles, a date, and the first system message apart: Llama 3.
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday: " + date_string + "\\n" + system_message + "<|im_end|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}{{ call.function.arguments | tojson }}{{ "}" }}
        {%- endfor %}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""

# Thoughts cut from earlier answers, a namespace, a loop from the end, tools as JSON lines, a macro: Qwen 3.
THOUGHTS = """\
{%- macro open(role) %}{{ '<|im_start|>' + role + '\\n' }}{% endmacro %}
{%- if tools %}
    {{- open('system') }}{% for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.seeking and message.role == "user" %}
        {%- set ns.seeking = false %}
        {%- set ns.last_user = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last_user %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- open(message.role) + content }}{% generation %}{{ '<|im_end|>\\n' }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- open('assistant') }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Instructions in brackets, the system message joined to the first user's, and an error for other roles: Mistral.
BRACKETS = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of a system message.") }}
    {%- endif %}
{%- endfor %}
"""

# Turns with the assistant by another name, which must alternate, no system role: Gemma. Lines and indentation matter.
TURNS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'assistant' %}
        {% set role = 'model' %}
    {% else %}
        {% set role = message['role'] %}
    {% endif %}
<start_of_turn>{{ role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
    {% if message['content'] == '' %}{% continue %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}
"""
FAMILIES = {"headers": HEADERS, "thoughts": THOUGHTS, "brackets": BRACKETS, "turns": TURNS}


@pytest.mark.parametrize("family", FAMILIES)
def test_like_transformers(tmp_path: Path, family: str) -> None:
    from jinja2.exceptions import TemplateError
    from transformers import AutoTokenizer

    directory = write_tokenizer(tmp_path, chat_template=FAMILIES[family])
    theirs, ours = AutoTokenizer.from_pretrained(directory), Tokenizer.from_directory(directory)
    num_refused = 0
    variables: list[dict[str, Any]] = [{}, {"tools": TOOLS}, {"enable_thinking": False, "date_string": "1 May 2030"}]
    for messages in CONVERSATIONS:
        for given in variables:
            for add_generation_prompt in (True, False):
                try:
                    expected = theirs.apply_chat_template(
                        messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False, **given
                    )
                except TemplateError as exc:
                    num_refused += 1
                    with pytest.raises(ConfigError, match=str(exc)[:40].replace("/", ".")):
                        ours.apply_chat_template(messages, add_generation_prompt, **given)
                else:
                    assert ours.apply_chat_template(messages, add_generation_prompt, **given) == expected
    assert (num_refused > 0) == (family in ("brackets", "turns"))
