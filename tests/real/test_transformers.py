"""Our template and our segments beside `transformers`, installed apart for this: 500 chats with tools per family."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrelay.edge.tokens.local import LocalTokenizer
from kvrelay.edge.tokens.template import ChatTemplate, as_templates_expect
from tests.edge.tokens import chats
from tests.edge.tokens.families import FAMILIES

REQUIREMENT = "transformers==5.24.0"
SEED = 20_062
BOS = "<s>"

# Reads one case per line, writes the ids of one chat per line.
SCRIPT = """
import json, sys
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

setup, *cases = map(json.loads, sys.stdin)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(setup["tokenizer"]), bos_token=setup["bos"])
tokenizer.chat_template = setup["template"]
for case in cases:
    ids = tokenizer.apply_chat_template(add_generation_prompt=True, tokenize=True, return_dict=False, **case)
    print(json.dumps(ids))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    installer = [str(folder / "bin/pip"), "install", "--quiet", "--disable-pip-version-check", REQUIREMENT, "jinja2"]
    subprocess.run(installer, check=True, timeout=600)
    return folder / "bin/python"


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.covers("S19", "S21")
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_transformers(python: Path, family: str) -> None:
    make, template = FAMILIES[family]
    tokenizer, chance = make(), random.Random(SEED)
    bos = BOS if tokenizer.token_to_id(BOS) is not None else None
    setup = {"tokenizer": tokenizer.to_str(), "template": template, "bos": bos}
    wanted = [chats.chat(chance) for _ in range(500)]
    theirs = _transformers_ids(python, setup, wanted)
    ours = LocalTokenizer(tokenizer, ChatTemplate(template, {"bos_token": bos} if bos else {}), cache_bytes=2**24)
    for number, (chat, ids) in enumerate(zip(wanted, theirs, strict=True)):
        assert np.array_equal(ours.encode(chats.prompt_of(**chat)), ids), (family, SEED, number)
    about = ours.describe()
    assert about["cache"] == "on" and about["hits"] > 0
    ours.close()


def _transformers_ids(python: Path, setup: dict[str, Any], wanted: list[dict[str, Any]]) -> list[list[int]]:
    cases = [
        {
            "conversation": [as_templates_expect(message, wants_parts=False) for message in chat["messages"]],
            "tools": chat["tools"],
        }
        for chat in wanted
    ]
    lines = "\n".join(map(json.dumps, [setup, *cases]))
    done = subprocess.run([str(python), "-c", SCRIPT], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
