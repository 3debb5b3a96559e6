"""From a readable body to the prompt that the router gets: its length and its block keys."""

from __future__ import annotations

from kvrelay.core.model.prompt import Prompt
from kvrelay.core.routing.router import Router
from kvrelay.edge.gateway.openai import RequestBody, TextPrompt, TokenPrompt, Unscored
from kvrelay.edge.tokens.service import KnownTokens, TokenService


def prompt_at_once(
    router: Router, tokens: TokenService, body: RequestBody, adapter: str | None, salt: str | None
) -> Prompt | None:
    """None: the prompt is a text whose tokens are not known yet, see `prompt_in_time`."""
    prompt = body.prompt
    match prompt:
        case TokenPrompt():
            return _made(router, KnownTokens(prompt.token_ids), prompt.total_tokens, adapter=adapter, salt=salt)
        case Unscored():
            return Prompt(None, {}, prompt.because)
        case TextPrompt():
            if not router.block_sizes():
                return Prompt(None, {}, "no_worker_to_match")  # nothing could be done with the tokens
            if not router.policy.needs_match:
                return Prompt(None, {}, "policy_needs_no_tokens")  # tokenizing costs more than such a policy itself
            found = tokens.at_once(prompt, body.model)
            return None if found is None else _prompt_of(router, found, adapter=adapter, salt=salt)


async def prompt_in_time(router: Router, tokens: TokenService, body: RequestBody, salt: str | None) -> Prompt:
    """Of a text that `prompt_at_once` could not do: asks the tokenizer, for as long as it may take.

    Unscored with a reason otherwise.
    """
    assert isinstance(body.prompt, TextPrompt), type(body.prompt)
    found = await tokens.token_ids(body.prompt, body.model)
    return _prompt_of(router, found, adapter=router.adapter_of(body.model), salt=salt)


def _prompt_of(router: Router, found: KnownTokens | Unscored, *, adapter: str | None, salt: str | None) -> Prompt:
    if isinstance(found, Unscored):
        return Prompt(None, {}, found.because)
    return _made(router, found, len(found.token_ids), adapter=adapter, salt=salt)


def _made(router: Router, known: KnownTokens, total_tokens: int, *, adapter: str | None, salt: str | None) -> Prompt:
    """Keys for every block size in use; `total_tokens` is what the worker will have to compute."""
    keyer = router.keyer
    keys = {size: known.keys(keyer, size, adapter=adapter, salt=salt) for size in router.block_sizes()}
    return Prompt(total_tokens, keys)
