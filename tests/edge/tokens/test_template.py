"""A chat becomes the text that the engine would tokenize."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvrelay.edge.tokens.service import CannotTokenize
from kvrelay.edge.tokens.template import ChatTemplate, as_templates_expect
from tests.edge.tokens.families import CHATML

TOOL = {"type": "function", "function": {"name": "f", "description": "<d>", "parameters": {"b": 1, "a": "é"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "g", "description": "", "parameters": {}}}
PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"


def rendered(source: str, special: dict[str, str] | None = None, **members: Any) -> str:
    members.setdefault("messages", [{"role": "user", "content": "hi"}])
    payload = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in members.items()}
    return ChatTemplate(source, special or {}).render(payload)


@pytest.mark.covers("S19")
def test_text_parts_become_one_text_for_a_template_that_expects_texts() -> None:
    def shown(content: object) -> str:
        return rendered("{{ messages[0].content }}", messages=[{"role": "user", "content": content}])

    assert shown("one") == shown([{"type": "text", "text": "one"}]) == "one"
    assert shown([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]) == "one\ntwo"
    assert shown(["one", {"type": "input_text", "text": "two"}]) == "one\ntwo"
    assert shown(None) == shown([]) == ""


@pytest.mark.covers("S19")
@pytest.mark.parametrize(
    "source",
    [
        PARTS,
        "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set c = m.content %}{% for p in c %}[{{ p.text }}]{% endfor %}{% endfor %}",
        "{% macro all(content) %}{% for p in content %}[{{ p.text }}]{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ all(m.content) }}{% endfor %}",
        "{% for m in messages %}{% for p in m.content | list %}[{{ p.text }}]{% endfor %}{% endfor %}",
    ],
)
def test_texts_become_parts_for_a_template_that_goes_through_parts(source: str) -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": [{"type": "text", "text": "two"}]}]
    assert rendered(source, messages=messages) == "[one][two]"


@pytest.mark.covers("S19")
def test_a_part_that_is_no_text_is_not_guessed_at() -> None:
    for source in ("{{ messages[0].content }}", PARTS):
        with pytest.raises(CannotTokenize, match="content_part_not_text"):
            rendered(source, messages=[{"role": "user", "content": [{"type": "file", "file": {}}]}])


@pytest.mark.covers("S21")
def test_tools_their_order_and_options_are_part_of_the_text() -> None:
    variants = [
        rendered(CHATML),
        rendered(CHATML, tools=[TOOL]),
        rendered(CHATML, tools=[TOOL, OTHER_TOOL]),
        rendered(CHATML, tools=[OTHER_TOOL, TOOL]),
        rendered(CHATML, chat_template_kwargs={"enable_thinking": False}),
        rendered(CHATML, add_generation_prompt=False),
    ]
    assert len(set(variants)) == len(variants)
    assert variants[0] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert variants[1] == (
        "<|im_start|>system\n# Tools\n<|tool|>" + json.dumps(TOOL, ensure_ascii=False) + "\n<|im_end|>\n" + variants[0]
    )
    assert variants[4] == variants[0] + "<think>\n\n</think>\n\n"
    assert rendered(CHATML, tools=None) == variants[0]


@pytest.mark.covers("S21")
def test_tools_get_the_members_and_the_order_that_the_engine_gives_them() -> None:
    sent = [{"function": {"parameters": {"z": 1}, "name": "f", "strict": True}, "type": "function", "more": 1}]
    function = {"name": "f", "description": None, "parameters": {"z": 1}, "strict": True}
    expected = [{"type": "function", "function": function, "more": 1}]
    assert rendered("{{ tools | tojson }}", tools=sent) == json.dumps(expected)


@pytest.mark.covers("S21")
def test_tool_calls_come_with_objects_as_arguments() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    made = as_templates_expect({"role": "assistant", "content": None, "tool_calls": [call]}, wants_parts=False)
    function = {"name": "f", "arguments": {"a": 1}}
    assert made == {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]}
    empty = {"role": "assistant", "content": "x", "tool_calls": [], "unknown": 1}
    assert as_templates_expect(empty, wants_parts=False) == {"role": "assistant", "content": "x"}
    answer = {"role": "tool", "tool_call_id": "c", "name": "f", "content": "4"}
    assert as_templates_expect(answer, wants_parts=False) == answer


def test_the_environment_is_the_one_that_templates_are_written_for() -> None:
    assert rendered("{{ '<&é' | tojson }}") == '"<&é"'
    assert rendered("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert rendered("{% for x in [1, 2] %}{{ x }}{% break %}{% endfor %}") == "1"
    assert rendered("a{% generation %}b{{ bos_token }}{% endgeneration %}c", {"bos_token": "<s>"}) == "ab<s>c"
    assert rendered("{{ eos_token is defined }}{{ eos_token }}") == "False"
    assert rendered("  {% if true %}\n x\n  {% endif %}\ny") == " x\ny"
    assert rendered("{{ strftime_now('%Y') }}").isdigit()
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).tells_time


@pytest.mark.parametrize(
    ("members", "because"),
    [
        ({"chat_template": "x"}, "own_chat_template"),
        ({"continue_final_message": True}, "continues_final_message"),
        ({"messages": "hi"}, "template_failed"),
        ({"messages": [{"content": "hi"}]}, "template_failed"),
        ({"messages": [1]}, "template_failed"),
        ({"tools": [{}]}, "template_failed"),
        ({"tools": 7}, "template_failed"),
        ({"chat_template_kwargs": [1]}, "template_failed"),
        ({"chat_template_kwargs": {"no": True}}, "template_failed"),
    ],
)
def test_what_cannot_be_rendered_is_a_reason(members: dict[str, Any], because: str) -> None:
    source = "{% if no %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    with pytest.raises(CannotTokenize, match=f"^{because}$"):
        rendered(source, **members)


def test_neither_half_characters_nor_depth_break_it() -> None:
    for raw in (b'[{"role":"user","content":"\\ud800"}]', b"[" * 100_000 + b"]" * 100_000, b"[1,", b"\xff"):
        with pytest.raises(CannotTokenize, match="template_failed"):
            ChatTemplate("{{ messages[0].content }}", {}).render({"messages": msgspec.Raw(raw)})
