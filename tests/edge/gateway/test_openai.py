"""What is read of a request body, and what is left alone."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.edge.gateway.openai import TextPrompt, TokenPrompt, Unscored, read_body, with_salt

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ids_of(prompt: object) -> tuple[list[int], int]:
    assert isinstance(prompt, TokenPrompt), prompt
    return prompt.token_ids.tolist(), prompt.total_tokens


def test_token_prompts_are_used_as_they_are() -> None:
    assert ids_of(read_body(COMPLETIONS, b'{"prompt":[1, 2,4294967295]}').prompt) == ([1, 2, 4294967295], 3)


def test_a_list_of_prompts_is_matched_by_its_first_and_charged_for_all() -> None:
    assert ids_of(read_body(COMPLETIONS, b'{"prompt":[ [1,2],[3,4,5]]}').prompt) == ([1, 2], 5)


@pytest.mark.parametrize(
    ("path", "body", "because"),
    [
        (COMPLETIONS, b"", "no_body"),
        (COMPLETIONS, b"\xff\xfe", "body_not_json"),
        (COMPLETIONS, b'["prompt"]', "body_not_json"),
        (COMPLETIONS, b"[" * 100_000, "body_not_json"),
        (COMPLETIONS, b"{}", "no_prompt"),
        (COMPLETIONS, b'{"prompt":[]}', "prompt_empty"),
        (COMPLETIONS, b'{"prompt":7}', "prompt_shape_unknown"),
        (COMPLETIONS, b'{"prompt":[1,"a"]}', "prompt_shape_unknown"),
        (COMPLETIONS, b'{"prompt":[-1]}', "prompt_shape_unknown"),
        (COMPLETIONS, b'{"prompt":[4294967296]}', "prompt_shape_unknown"),
        (COMPLETIONS, b'{"prompt":["a","b"]}', "several_text_prompts"),
        (COMPLETIONS, b'{"prompt":[1,2],"prompt_logprobs":0}', "prompt_logprobs"),
        (COMPLETIONS, b'{"prompt":[1,2],"echo":true,"logprobs":1}', "prompt_logprobs"),
        (CHAT, b'{"messages":[],"prompt_logprobs":5}', "prompt_logprobs"),
        (CHAT, b"{}", "no_messages"),
        (CHAT, b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}', "multimodal_input"),
        ("/v1/embeddings", b'{"input":"x"}', "path_not_scored"),
    ],
)
def test_what_cannot_be_matched_says_why(path: str, body: bytes, because: str) -> None:
    prompt = read_body(path, body).prompt
    found = prompt.read() if isinstance(prompt, TextPrompt) else prompt
    assert found == Unscored(because)


@pytest.mark.parametrize(
    "more", [b'"prompt_logprobs":null', b'"echo":true', b'"echo":false,"logprobs":1', b'"logprobs":1', b'"x":1']
)
def test_probabilities_of_the_answer_alone_let_the_prompt_be_matched(more: bytes) -> None:
    assert ids_of(read_body(COMPLETIONS, b'{"prompt":[1,2],' + more + b"}").prompt) == ([1, 2], 2)


def test_members_of_wrong_type_are_the_workers_to_complain_about() -> None:
    body = read_body(COMPLETIONS, b'{"prompt":"hi","model":7,"stream":"yes","cache_salt":{}}')
    assert isinstance(body.prompt, TextPrompt)
    assert (body.model, body.streams, body.cache_salt) == (None, False, None)


def test_the_members_that_matter() -> None:
    body = read_body(CHAT, b'{"messages":[],"model":"m","stream":true,"cache_salt":"s"}')
    assert (body.model, body.streams, body.cache_salt) == ("m", True, "s")


def test_only_what_changes_the_rendered_prompt_names_it_in_the_cache() -> None:
    def raw(**members: object) -> bytes:
        prompt = read_body(
            CHAT, msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **members})
        ).prompt
        assert isinstance(prompt, TextPrompt)
        return prompt.raw

    assert raw(temperature=1) == raw(temperature=2)
    assert raw(tools=[{"type": "function"}]) != raw()


def test_a_word_about_images_is_no_image() -> None:
    body = msgspec.json.encode({"messages": [{"role": "user", "content": 'say "image_url" aloud'}]})
    assert isinstance(read_body(CHAT, body).prompt, TextPrompt)


def test_a_tenants_salt_goes_over_the_clients() -> None:
    salted = with_salt(b'{"a":1.50,"cache_salt":"mine"}', "tenant")
    assert salted is not None
    body, salt = salted
    assert salt == "tenant:mine" and b'"a":1.50' in body
    assert msgspec.json.decode(body)["cache_salt"] == salt
    assert with_salt(b"[]", "tenant") is None


def test_chats_that_differ_in_the_kind_of_a_member_are_different_texts() -> None:
    texts = [read_body(CHAT, b'{"messages":[],"%b":[{"a":1}]}' % member).prompt for member in (b"tools", b"documents")]
    assert isinstance(texts[0], TextPrompt) and isinstance(texts[1], TextPrompt) and texts[0].raw != texts[1].raw
