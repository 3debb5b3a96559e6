"""What one HTTP request wants from the engine, whatever API it came by. Members that are not known are ignored."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.worker import tokenizer
from kvrelay.edge.worker.answers import RequestError
from kvrelay.edge.worker.dialect import Dialect
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.edge.worker.tokenizer import ChatMessage

if TYPE_CHECKING:
    from kvrelay.edge.worker.reply import Reply

T = TypeVar("T")

MAX_CHOICES = 128


class Generation(Struct, frozen=True, eq=False):
    """`n` samples of each prompt."""

    dialect: Callable[[Reply], Dialect]
    id_prefix: str
    model: str
    adapter: str | None
    salt: str | None
    prompts: tuple[TokenIds, ...]
    choices_per_prompt: int
    max_tokens: tuple[int, ...]  # per prompt: what the context leaves of what was asked
    natural_end: bool
    stream: bool


class Limit(Struct, frozen=True):
    """How many tokens at most, and whether the mock's model would end there by itself."""

    tokens: int
    natural: bool


class OutOfVocabulary(RequestError):
    """A token id that the model does not have. In a stream it is noticed only after the status line."""

    def __init__(self, token_id: int) -> None:
        super().__init__(400, f"Token id {token_id} is out of vocabulary")


def decode_body(body: bytes, kind: type[T]) -> T:
    """The body as `kind`; RequestError when it is no JSON or has a member of the wrong type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"Invalid request body: {error}") from error


def make_generation(
    *,
    dialect: Callable[[Reply], Dialect],
    id_prefix: str,
    spec: MockSpec,
    model: str | None,
    prompts: tuple[TokenIds, ...],
    limit: Limit,
    n: int | None = None,
    salt: str | None = None,
    stream: bool | None = None,
) -> Generation:
    """Raises RequestError for what the engine would refuse."""
    choices = 1 if n is None else n
    if not 1 <= choices * len(prompts) <= MAX_CHOICES:
        raise RequestError(400, f"`n` x prompts is {choices * len(prompts)}; legal: 1..{MAX_CHOICES}", param="n")
    if limit.tokens < 1:
        raise RequestError(400, f"max_tokens must be at least 1, got {limit.tokens}.", param="max_tokens")
    if salt == "":
        raise RequestError(400, "`cache_salt` must be a non-empty string", param="cache_salt")
    return Generation(
        dialect=dialect,
        id_prefix=id_prefix,
        model=model or spec.model,
        adapter=adapter_of(model, spec),
        salt=salt,
        prompts=prompts,
        choices_per_prompt=choices,
        max_tokens=tuple(_tokens_left(len(prompt), limit.tokens, spec) for prompt in prompts),
        natural_end=limit.natural,
        stream=bool(stream),
    )


def limit_or_natural(asked: int | None, spec: MockSpec) -> Limit:
    """Where nothing is asked, the mock's reply ends by itself after `reply_tokens`."""
    return Limit(spec.reply_tokens, natural=True) if asked is None else Limit(asked, natural=False)


def adapter_of(model: str | None, spec: MockSpec) -> str | None:
    """None for the base model; RequestError 404 for a model that is not served."""
    if model is None or model == spec.model:
        return None
    if model in spec.adapters:
        return model
    raise RequestError(404, f"The model `{model}` does not exist.", param="model")


def chat_tokens(
    messages: list[ChatMessage],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[Any] | None,
) -> TokenIds:
    if not messages:
        raise RequestError(400, "`messages` is empty", param="messages")
    if add_generation_prompt and continue_final_message:
        raise RequestError(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    try:
        text = tokenizer.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools or (),
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(400, str(error), param="messages") from error
    return tokenizer.encode(text)


def read_prompts(received: Any, *, name: str = "prompt") -> tuple[TokenIds, ...]:
    """A text, token ids, or a list of either."""
    if isinstance(received, str):
        received = [received]
    if not isinstance(received, list) or not received:
        raise RequestError(400, f"`{name}` must be a text, a list of token ids, or a non-empty list of these")
    if isinstance(received[0], int):
        received = [received]
    prompts = tuple(_one_prompt(prompt, name) for prompt in received)
    if any(len(prompt) == 0 for prompt in prompts):
        raise RequestError(400, f"The {name} is empty", param=name)
    return prompts


def check_vocabulary(prompts: tuple[TokenIds, ...], spec: MockSpec) -> None:
    """RequestError for a token id that the model does not have."""
    for prompt in prompts:
        largest = int(prompt.max())
        if largest >= spec.vocab_size:
            raise OutOfVocabulary(largest)


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


def _one_prompt(received: Any, name: str) -> TokenIds:
    if isinstance(received, str):
        return tokenizer.encode(received)
    try:
        return np.frombuffer(array("I", received), dtype=np.uint32)
    except OverflowError as error:
        raise RequestError(400, "a token id is negative or does not fit 32 bits", param=name) from error
    except TypeError as error:
        raise RequestError(400, f"a {name} must be a text or a list of token ids", param=name) from error
