"""`make bench`: every figure with its limit and, beside it, what the rig itself could do.

    python -m bench [decision|gateway|processes|abort|observe|stores|peers]...

Exit code 1 when a figure is over its limit. Run it on a quiet machine: the limits are for an idle one.
"""

from __future__ import annotations

import importlib
import sys

from bench.figure import Figure

PARTS = ("decision", "gateway", "processes", "abort", "observe", "stores", "peers")


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"error: unknown benchmark `{unknown[0]}`; known: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    over = 0
    print(f"{'figure':<58} {'value':>10} {'limit':>10}   rig's ceiling")
    for name in names or PARTS:
        for figure in importlib.import_module(f"bench.{name}").run():
            print(_line(figure), flush=True)
            over += _over(figure)
    return 1 if over else 0


def _over(figure: Figure) -> bool:
    return figure.limit is not None and figure.value > figure.limit


def _line(figure: Figure) -> str:
    limit = "" if figure.limit is None else f"{figure.limit:.4g}"
    ceiling = "" if figure.ceiling is None else f"{figure.ceiling:,.4g} ({figure.ceiling_name})"
    mark = "  OVER" if _over(figure) else ""
    return f"{figure.name:<58} {figure.value:>10,.2f} {limit:>10} {figure.unit:<8} {ceiling}{mark}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
