"""Print which requirement and scenario ids are shown by which tests, and which are still open.

python -m tests.coverage_matrix [--open]
"""

from __future__ import annotations

import contextlib
import io
import sys

import pytest

from tests.requirements import IDS


class _Collector:
    """Notes the `covers` markers of everything that is collected."""

    def __init__(self) -> None:
        self.tests_of: dict[str, list[str]] = {name: [] for name in IDS}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            function = item.nodeid.split("[")[0]
            for marker in item.iter_markers("covers"):
                for name in marker.args:
                    if function not in self.tests_of[name]:
                        self.tests_of[name].append(function)


def collect() -> dict[str, list[str]]:
    collector = _Collector()
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[collector])
    if code != pytest.ExitCode.OK:
        sys.exit(f"collection failed:\n{noise.getvalue()}")
    return collector.tests_of


def main() -> None:
    tests_of = collect()
    for name, tests in tests_of.items():
        if tests and "--open" not in sys.argv:
            print(f"{name}  {tests[0]}")
            for test in tests[1:]:
                print(f"{' ' * len(name)}  {test}")
    still_open = [name for name, tests in tests_of.items() if not tests]
    print(f"\n{len(IDS) - len(still_open)} of {len(IDS)} ids have tests; open: {' '.join(still_open) or 'none'}")


if __name__ == "__main__":
    main()
