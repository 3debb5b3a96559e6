"""Reads completion and chat bodies into one shape. Unknown members are ignored, as the engine does."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.worker import tokenizer
from kvrelay.edge.worker.answers import RequestError
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.edge.worker.tokenizer import ChatMessage

T = TypeVar("T")

COMPLETION_DEFAULT_TOKENS = 16
MAX_CHOICES = 128


class StreamOptions(Struct):
    include_usage: bool = False


class _Sampling(Struct, kw_only=True):
    """Members that both bodies have."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    cache_salt: str | None = None


class CompletionBody(_Sampling, kw_only=True):
    prompt: Any = None


class ChatBody(_Sampling, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True


class Generation(Struct, frozen=True, eq=False):
    """What one HTTP request wants from the engine: `n` samples of each prompt."""

    chat: bool
    model: str
    adapter: str | None
    salt: str | None
    prompts: tuple[TokenIds, ...]
    choices_per_prompt: int
    max_tokens: tuple[int, ...]  # per prompt: what the context leaves of what was asked
    natural_end: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool


class OutOfVocabulary(RequestError):
    """A token id that the model does not have. In a stream it is noticed only after the status line."""

    def __init__(self, token_id: int) -> None:
        super().__init__(400, f"Token id {token_id} is out of vocabulary")


def decode_body(body: bytes, kind: type[T]) -> T:
    """The body as `kind`; RequestError when it is no JSON or has a member of the wrong type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise RequestError(400, f"Invalid request body: {error}") from error


def read_completion(body: CompletionBody, spec: MockSpec) -> Generation:
    prompts = _prompts(body.prompt)
    asked = COMPLETION_DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    return _generation(body, spec, chat=False, prompts=prompts, asked_tokens=asked, natural_end=False)


def read_chat(body: ChatBody, spec: MockSpec) -> Generation:
    """Without a limit in the body the mock's reply ends by itself after `reply_tokens`."""
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    natural_end = asked is None and not body.ignore_eos
    if asked is None:
        asked = spec.reply_tokens if natural_end else spec.context_tokens
    prompts = (chat_tokens(body.messages, add_generation_prompt=body.add_generation_prompt),)
    return _generation(body, spec, chat=True, prompts=prompts, asked_tokens=asked, natural_end=natural_end)


def chat_tokens(messages: list[ChatMessage], *, add_generation_prompt: bool) -> TokenIds:
    if not messages:
        raise RequestError(400, "`messages` is empty", param="messages")
    try:
        return tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt))
    except ValueError as error:
        raise RequestError(400, str(error), param="messages") from error


def adapter_of(model: str | None, spec: MockSpec) -> str | None:
    """None for the base model; RequestError 404 for a model that is not served."""
    if model is None or model == spec.model:
        return None
    if model in spec.adapters:
        return model
    raise RequestError(404, f"The model `{model}` does not exist.", param="model")


def _generation(
    body: _Sampling, spec: MockSpec, *, chat: bool, prompts: tuple[TokenIds, ...], asked_tokens: int, natural_end: bool
) -> Generation:
    choices = 1 if body.n is None else body.n
    if not 1 <= choices * len(prompts) <= MAX_CHOICES:
        raise RequestError(400, f"`n` x prompts is {choices * len(prompts)}; legal: 1..{MAX_CHOICES}", param="n")
    if asked_tokens < 1:
        raise RequestError(400, f"max_tokens must be at least 1, got {asked_tokens}.", param="max_tokens")
    if body.cache_salt == "":
        raise RequestError(400, "`cache_salt` must be a non-empty string", param="cache_salt")
    return Generation(
        chat=chat,
        model=body.model or spec.model,
        adapter=adapter_of(body.model, spec),
        salt=body.cache_salt,
        prompts=prompts,
        choices_per_prompt=choices,
        max_tokens=tuple(_tokens_left(len(prompt), asked_tokens, spec) for prompt in prompts),
        natural_end=natural_end,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        return_token_ids=bool(body.return_token_ids),
    )


def _tokens_left(prompt_tokens: int, asked_tokens: int, spec: MockSpec) -> int:
    """Output is cut at the context length; a prompt that leaves no room for output is an error."""
    left = spec.context_tokens - prompt_tokens
    if left < 1:
        raise RequestError(
            400,
            f"This model's maximum context length is {spec.context_tokens} tokens. "
            f"However, your request has {prompt_tokens} input tokens.",
            param="input_tokens",
        )
    return min(asked_tokens, left)


def _prompts(received: Any) -> tuple[TokenIds, ...]:
    """A text, token ids, or a list of either."""
    if isinstance(received, str):
        received = [received]
    if not isinstance(received, list) or not received:
        raise RequestError(400, "`prompt` must be a text, a list of token ids, or a non-empty list of these")
    if isinstance(received[0], int):
        received = [received]
    prompts = tuple(_one_prompt(prompt) for prompt in received)
    if any(len(prompt) == 0 for prompt in prompts):
        raise RequestError(400, "The prompt is empty", param="prompt")
    return prompts


def _one_prompt(received: Any) -> TokenIds:
    if isinstance(received, str):
        return tokenizer.encode(received)
    try:
        return np.frombuffer(array("I", received), dtype=np.uint32)
    except OverflowError as error:
        raise RequestError(400, "a token id is negative or does not fit 32 bits", param="prompt") from error
    except TypeError as error:
        raise RequestError(400, "a prompt must be a text or a list of token ids", param="prompt") from error


def check_vocabulary(generation: Generation, spec: MockSpec) -> None:
    """RequestError for a token id that the model does not have."""
    for prompt in generation.prompts:
        largest = int(prompt.max())
        if largest >= spec.vocab_size:
            raise OutOfVocabulary(largest)


def read_tokenize(received: Mapping[str, Any]) -> TokenIds:
    """The body of /tokenize: `prompt` or `messages`."""
    if isinstance(received.get("prompt"), str):
        return tokenizer.encode(received["prompt"])
    try:
        messages = msgspec.convert(received.get("messages"), list[ChatMessage])
    except msgspec.ValidationError as error:
        raise RequestError(400, f"`prompt` (a text) or `messages` is needed: {error}") from error
    return chat_tokens(messages, add_generation_prompt=bool(received.get("add_generation_prompt", True)))
