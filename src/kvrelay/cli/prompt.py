"""`kvrelay prompt`: where two prompts part. What has to be the same is the tokens, not the meaning."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli import messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.messages import prompt as words
from kvrelay.cli.reporting import print_json

if TYPE_CHECKING:
    from kvrelay.core.model.prompt import TokenIds
    from kvrelay.edge.gateway.openai import RequestBody, TextPrompt
    from kvrelay.edge.tokens.local import LocalTokenizer

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Prompts as a cache sees them: where two of them part, and why.",
    epilog="Example: kvrelay prompt diff monday.json tuesday.json --tokenizer tokenizer.json --template chat.jinja",
)
AROUND = 6  # tokens that are shown from the first different one on


@app.callback()
def prompt() -> None:
    """Exit 0: one prompt begins with the other; 1: they part before that; 3: their tokens cannot be known."""


@app.command(
    epilog="Example: kvrelay prompt diff a.json b.json --tokenizer tokenizer.json --template chat_template.jinja",
    short_help="Name the first token in which two requests differ.",
)
def diff(
    left: Annotated[Path, typer.Argument(metavar="A.json", help="A request body: chat, completion or messages.")],
    right: Annotated[Path, typer.Argument(metavar="B.json", help="The other one.")],
    tokenizer: Annotated[Path | None, typer.Option(metavar="FILE", help="tokenizer.json of the model.")] = None,
    template: Annotated[Path | None, typer.Option(metavar="FILE", help="Its chat template (jinja).")] = None,
    file: Annotated[
        Path | None, typer.Option("-c", "--config", metavar="FILE", help="Take both from [tokens] of this file.")
    ] = None,
    worker: Annotated[str | None, typer.Option(metavar="URL", help="Ask this worker for the tokens instead.")] = None,
    block_size: Annotated[int, typer.Option(min=1, max=4096, help="Tokens per block of the engine.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print {parting, because, tokens} as JSON.")] = False,
) -> None:
    """Name the first token in which two requests differ, the blocks that they can share, and what made them differ.

    Tools and schemas in another order mean the same and share nothing: their tokens come before everything else.
    """
    from kvrelay.core.contract.same_prefix import parting
    from kvrelay.edge.tokens.request_difference import first_difference

    bodies = [_body(one) for one in (left, right)]
    local = _local(tokenizer, template, file)
    try:
        ids = [_ids(path, raw, local, worker) for path, (raw, _) in zip((left, right), bodies, strict=True)]
    finally:
        if local is not None:
            local.close()
    found = parting(*ids, block_size_tokens=block_size)
    because = None if found.at_token is None else first_difference(bodies[0][1], bodies[1][1])
    at = found.at_token or 0
    shown = [one[at : at + AROUND] for one in ids]
    texts = [None if local is None else local.text_of(one) for one in shown]
    if as_json:
        tokens = [{"ids": one.tolist(), "text": text} for one, text in zip(shown, texts, strict=True)]
        report = {"parting": found, "because": because, "tokens": None if found.at_token is None else tokens}
        print_json(report)
    else:
        sys.stdout.write(words.diff(found, because, (texts[0], texts[1])))
    raise typer.Exit(messages.OK if found.at_token is None else messages.VERDICT_FAIL)


def _body(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        raw = path.read_bytes()
        decoded = json.loads(raw)
    except OSError as problem:
        messages.fail(messages.unusable_input(f"`{path}`", problem))
    except ValueError as problem:
        messages.fail(words.not_a_request(path, str(problem)))
    if not isinstance(decoded, dict) or not {"messages", "prompt"} & decoded.keys():
        messages.fail(words.not_a_request(path, "it has neither `messages` nor `prompt`"))
    return raw, decoded


def _local(tokenizer: Path | None, template: Path | None, file: Path | None) -> LocalTokenizer | None:
    from kvrelay.cli.gateway_flags import effective_config
    from kvrelay.edge.system.sections import TokensSection

    section = TokensSection(tokenizer=tokenizer, template=template)
    if tokenizer is None and file is not None:
        config = effective_config(file, workers=None, policy=None, host=None, port=None, admin_port=None)
        section = config.tokens
    if section.tokenizer is None:
        return None
    try:
        from kvrelay.edge.tokens.local import local_tokenizer

        return local_tokenizer(section, cache_bytes=0)
    except ImportError:
        messages.fail("error: tokenizing here needs an extra\nhint: pip install 'kvrelay[tokens]', or use --worker URL")
    except (OSError, ValueError) as problem:
        messages.fail(messages.unusable_input(f"`{section.tokenizer}` and its template", problem))


def _ids(path: Path, raw: bytes, local: LocalTokenizer | None, worker: str | None) -> TokenIds:
    from kvrelay.edge.gateway.openai import TokenPrompt, Unscored, read_body

    body: RequestBody = read_body(_path_of(raw), raw)
    if isinstance(body.prompt, Unscored):
        messages.fail(words.not_tokenized(path, body.prompt.because), code=messages.UNKNOWN)
    if isinstance(body.prompt, TokenPrompt):
        return body.prompt.token_ids
    return _tokenized(path, body.prompt, body.model, local, worker)


def _path_of(raw: bytes) -> str:
    """Which API the body is meant for, by its members: Anthropic's has its system prompt beside the messages."""
    members = json.loads(raw)
    if "messages" not in members:
        return "/v1/completions"
    return "/v1/messages" if "system" in members else "/v1/chat/completions"


def _tokenized(
    path: Path, prompt: TextPrompt, model: str | None, local: LocalTokenizer | None, worker: str | None
) -> TokenIds:
    from kvrelay.edge.tokens.service import CannotTokenize

    problem = prompt.read()
    if problem is not None:
        messages.fail(words.not_tokenized(path, problem.because), code=messages.UNKNOWN)
    if local is None and worker is None:
        messages.fail(words.no_tokenizer())
    try:
        if local is not None:
            return local.encode(prompt)
        assert worker is not None
        return asyncio.run(_asked(worker, prompt, model))
    except CannotTokenize as reason:
        messages.fail(words.not_tokenized(path, str(reason)), code=messages.UNKNOWN)


async def _asked(url: str, prompt: TextPrompt, model: str | None) -> TokenIds:
    """Raises CannotTokenize."""
    import aiohttp

    from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
    from kvrelay.edge.connectors.registry import detect
    from kvrelay.edge.tokens.service import CannotTokenize

    question = dict(prompt.payload) if model is None else {"model": model, **prompt.payload}
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            connector = await detect(session, url, {})
            return await connector.tokenize(session, url, question, {})
    except (WorkerUnreachable, WorkerAnswerUnusable) as problem:
        raise CannotTokenize(str(problem)) from problem
