"""Groups of commands that answer wrong input in our words: what was received, what is legal, what to try next."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from kvrelay.cli import messages

# Typer keeps the classes of its usage errors to itself; this one is public, and they are its ancestors.
_USAGE_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
_LEGAL_WORDS = {  # of the validator's phrases
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


class CommandGroup(TyperGroup):
    """A group that knows its commands by name and suggests the nearest one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names:
            messages.fail(messages.unknown_name("command", args[0], names, source=f"`{ctx.command_path}`"))
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **extra: Any) -> Any:
        standalone_mode = extra.get("standalone_mode", True)
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except _USAGE_ERRORS as error:
            if not standalone_mode:
                raise
            _explain(error)
        if not standalone_mode:
            return status
        sys.exit(status or messages.OK)


def _explain(error: Any) -> NoReturn:
    """Ends the process. What is needed is asked for by name, since only some of these errors have it."""
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "kvrelay"
    parameter = getattr(error, "param", None)
    match type(error).__name__:
        case "NoArgsIsHelpError":
            messages.fail(error.format_message())
        case "NoSuchOption":
            known = [name for one in context.command.get_params(context) for name in one.opts if name[:2] == "--"]
            messages.fail(messages.unknown_name("option", error.option_name, known, source=f"`{command}`"))
        case "MissingParameter" if parameter is not None:
            messages.fail(messages.missing_argument(parameter.metavar or parameter.name.upper(), command))
        case "BadParameter" if parameter is not None and (received := _received(error)) is not None:
            messages.fail(messages.bad_value(parameter.opts[-1], received, _legal(error), source="the command line"))
        case _:
            messages.fail(messages.bad_usage(error.format_message(), command))


def _received(error: BaseException) -> object:
    """The text that was refused, from the error below; None when it does not say."""
    below: Any = error.__cause__
    details = below.errors() if hasattr(below, "errors") else []
    return details[0].get("input") if details else None


def _legal(error: Any) -> str:
    legal: str = error.message.removeprefix("Input should be ").partition(", unable to")[0]
    for phrase, words in _LEGAL_WORDS.items():
        legal = legal.replace(phrase, words)
    return legal
