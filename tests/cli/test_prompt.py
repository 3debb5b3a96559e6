"""`kvrelay prompt diff`: a reordered tool is another prefix, and the linter says which token and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app
from tests.edge.tokens.families import CHATML, byte_level

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
    for name in ("look_up", "translate")
]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a prefix?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("model")
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "chat.jinja").write_text(CHATML)
    return ("--tokenizer", str(folder / "tokenizer.json"), "--template", str(folder / "chat.jinja"))


def diff(folder: Path, left: Any, right: Any, *more: str) -> tuple[int, str, str]:
    files = []
    for name, body in (("a", left), ("b", right)):
        (folder / f"{name}.json").write_text(body if isinstance(body, str) else json.dumps(body))
        files.append(str(folder / f"{name}.json"))
    result = CliRunner().invoke(app, ["prompt", "diff", *files, *more])
    return result.exit_code, result.stdout, result.stderr


def chat(tools: list[Any] = TOOLS, messages: list[Any] = MESSAGES) -> dict[str, Any]:
    return {"model": "m", "messages": messages, "tools": tools}


@pytest.mark.covers("CC-12")
def test_reordered_tools_part_at_the_first_tools_name(tmp_path: Path, model: tuple[str, ...]) -> None:
    code, page, errors = diff(tmp_path, chat(), chat(TOOLS[::-1]), *model)

    assert code == 1, errors
    lines = page.splitlines()
    assert lines[0].startswith("first differing token: ")
    at = int(lines[0].split()[3])
    assert "look_up" in lines[1].replace(" ", "") and "look_up" not in lines[2].replace(" ", "")
    assert "blocks of 16 tokens can be shared" in lines[3] and lines[3].startswith(f"{at // 16} of ")
    assert lines[4:] == [
        "because: `tools` has the same items in another order",
        '  A: ["look_up", "translate"]',
        '  B: ["translate", "look_up"]',
    ]


@pytest.mark.covers("CC-12")
def test_a_schema_put_together_in_another_order_is_another_chain(tmp_path: Path, model: tuple[str, ...]) -> None:
    other = json.loads(json.dumps(TOOLS))
    parameters = other[1]["function"]["parameters"]
    other[1]["function"]["parameters"] = {name: parameters[name] for name in ("type", "required", "properties")}

    code, page, _ = diff(tmp_path, chat(), chat(other), *model, "--json")

    found = json.loads(page)
    assert code == 1
    assert found["because"]["path"] == "tools[1].function.parameters" and found["because"]["kind"] == "member_order"
    assert found["parting"]["same_chain"] is False
    shared = found["parting"]["shared_tokens"]
    assert found["parting"]["at_token"] == shared and found["parting"]["shared_blocks"] == shared // 16
    assert found["tokens"][0]["ids"][0] != found["tokens"][1]["ids"][0]


@pytest.mark.covers("CC-12")
def test_a_turn_that_follows_begins_with_the_one_before(tmp_path: Path, model: tuple[str, ...]) -> None:
    later = [*MESSAGES, {"role": "assistant", "content": "A beginning."}, {"role": "user", "content": "Of what?"}]
    code, page, _ = diff(tmp_path, chat(), chat(messages=later), *model)
    assert code == 0 and page.startswith("same prefix: one prompt begins with all ")


def test_prompts_of_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    code, page, _ = diff(tmp_path, {"prompt": list(range(40))}, {"prompt": [*range(33), 7]})
    assert code == 1
    assert page == (
        "first differing token: 33 (of 40 and 34)\n2 of 2 blocks of 16 tokens can be shared\n"
        "because: `prompt[33]` has another value\n  A: 33\n  B: 7\n"
    )


@pytest.mark.covers("CC-12")
def test_a_worker_can_be_asked_instead(tmp_path: Path) -> None:
    from kvrelay.edge.worker.launch import MockFleet
    from kvrelay.edge.worker.spec import MockSpec

    with MockFleet([MockSpec(name="w", model="m")]) as fleet:
        code, page, errors = diff(tmp_path, chat(), chat(TOOLS[::-1]), "--worker", fleet.workers[0].url)
    assert (code, errors) == (1, "")
    assert page.startswith("first differing token: ") and "`tools` has the same items in another order" in page


def test_what_cannot_be_known_is_said(tmp_path: Path, model: tuple[str, ...]) -> None:
    code, _, errors = diff(tmp_path, chat(), chat())
    assert code == 2 and errors.startswith("error: these prompts are text, and nothing says how it becomes tokens\n")
    code, _, errors = diff(tmp_path, chat(), chat(), *model[:2])
    assert (code, errors) == (3, f"unknown: the tokens of `{tmp_path}/a.json` cannot be known: no chat template\n")
    code, _, errors = diff(tmp_path, "[]", chat(), *model)
    assert code == 2 and "is no request: it has neither `messages` nor `prompt`" in errors
    code, _, errors = diff(tmp_path, chat(), chat(), "--worker", "http://127.0.0.1:1")
    assert code == 3 and errors.startswith("unknown: the tokens of ")
