"""The runbook as a page, from the few kinds of Markdown that it uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

_HEADING = re.compile(r"(#{1,3}) (.*)")


def runbook_page(markdown: str) -> str:
    """Sections of alerts have their code as their anchor, so that alerts can link to them."""
    body = "\n".join(_blocks(markdown.split("\n")))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Runbook - kvrelay</title>\n'
        '<link rel="icon" href="/ui/icon.svg">\n<link rel="stylesheet" href="/ui/style.css">\n</head>\n'
        f'<body class="prose">\n<main>\n<p><a href="/ui">Live page</a></p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def _blocks(lines: list[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        heading = _HEADING.fullmatch(line)
        end = at + 1
        if heading is not None:
            level = len(heading[1])
            yield f'<h{level} id="{escape(heading[2].lower().replace(" ", "-"))}">{_inline(heading[2])}</h{level}>'
        elif line.startswith("```"):
            end = lines.index("```", at + 1) + 1
            code = "\n".join(lines[at + 1 : end - 1])
            yield f'<pre tabindex="0"><code>{escape(code)}</code></pre>'
        elif line:
            while end < len(lines) and lines[end] and not lines[end].startswith(("#", "```")):
                end += 1
            yield _paragraph(lines[at:end])
        at = end


def _paragraph(lines: list[str]) -> str:
    first = lines[0]
    if first.startswith("|"):
        rows = [line.strip("|").split("|") for line in lines if set(line) - set("|-")]
        head, *rest = (_row(row, "td" if number else "th") for number, row in enumerate(rows))
        return f"<table><thead>{head}</thead><tbody>{''.join(rest)}</tbody></table>"
    for mark, tag in ((r"- ", "ul"), (r"\d+\. ", "ol")):
        if re.match(mark, first):
            items = re.split(rf"\n(?={mark})", "\n".join(lines))
            inner = "".join(f"<li>{_inline(re.sub(f'^{mark}', '', item))}</li>" for item in items)
            return f"<{tag}>{inner}</{tag}>"
    return f"<p>{_inline(' '.join(lines))}</p>"


def _row(cells: list[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{_inline(cell.strip())}</{tag}>' for cell in cells)}</tr>"


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
