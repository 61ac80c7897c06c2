"""The site of the documentation: what is generated is up to date, and links find their pages.

`make docs` builds all of it; here is what can be seen without MkDocs.
"""

import argparse
import json
from pathlib import Path

import pytest

from docs.theme.flags_page import PAGE, flags_page
from docs.theme.links import ROOT, for_site, notebooks, site_path, sources_of
from docs.theme.notebook_page import notebook_page
from docs.theme.pictures import files
from paged.http.cli import parsers


def test_the_page_of_flags_is_what_the_code_declares() -> None:
    assert PAGE.read_text() == flags_page(), "write it anew: python -m docs.theme.flags_page"


def test_the_page_of_flags_has_every_flag_of_every_command() -> None:
    page = PAGE.read_text()
    flags = {
        spelling
        for parser in parsers()
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        for spelling in action.option_strings
    }
    assert len(flags) > 150
    assert sorted(flag for flag in flags if f"`{flag}`" not in page) == ["-h"]


def test_pictures_are_what_their_program_draws() -> None:
    stale = [path.name for path, svg in files().items() if path.read_text() != svg]
    assert stale == [], "draw them anew: python -m docs.theme.pictures"


@pytest.mark.parametrize(
    ("uri", "text", "wanted"),
    [
        ("api.md", "[a](tools.md#b)", "[a](tools.md#b)"),
        ("api.md", "[a](../benchmarks/RESULTS.md#b)", "[a](benchmarks/RESULTS.md#b)"),
        ("api.md", "[a](../README.md)", "[a](index.md)"),
        ("api.md", "[flags.md](flags.md#memory)", "[Flags](flags.md#memory)"),
        ("api.md", "[a](../runtime/scheduler.py)", "[a](source/runtime/scheduler.py.md)"),
        ("api.md", "[a](../deploy/grafana)", "[a](source/deploy/grafana.md)"),
        (
            "api.md",
            "[a](../notebooks/01_quick_start.ipynb)",
            "[a](notebooks/01_quick_start.md)",
        ),
        ("notebooks/01_quick_start.md", "[a](../docs/api.md)", "[a](../api.md)"),
        ("benchmarks/RESULTS.md", "[a](../docs/api.md)", "[a](../api.md)"),
        ("CONTRIBUTING.md", "[a](docs/api.md)", "[a](api.md)"),
        ("api.md", "[a](https://b.c/d.md)", "[a](https://b.c/d.md)"),
        ("api.md", "[a](not_there.md)", "[a](not_there.md)"),
        ("api.md", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(uri: str, text: str, wanted: str) -> None:
    assert for_site(uri, text) == wanted


def test_sources_that_a_page_links_to_are_found() -> None:
    text = "[a](../runtime/scheduler.py) [b](tools.md) [c](../deploy/grafana) [d](https://e.f)"
    assert sources_of("api.md", text) == ["runtime/scheduler.py", "deploy/grafana"]


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_notebooks_become_pages(path: Path) -> None:
    page = notebook_page(path)
    assert page.startswith("# ")
    assert page.count("```python\n") == page.count("\n```\n") > 0
    assert site_path(path.relative_to(ROOT).as_posix()) == f"notebooks/{path.stem}.md"


def test_outputs_of_a_notebook_are_shown(tmp_path: Path) -> None:
    outputs = [
        {"output_type": "stream", "text": ["1 < 2\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["'a'"]}},
        {"output_type": "display_data", "data": {"image/png": "QUJD\n", "text/plain": "plot"}},
        {"output_type": "display_data", "data": {"image/svg+xml": "<?xml?>\n<svg>\n\n</svg>"}},
        {"output_type": "display_data", "data": {"text/html": "<b>\n\nx</b>"}},
    ]
    cells = [{"cell_type": "code", "source": ["a\n", "b"], "outputs": outputs}]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert notebook_page(path).split("\n\n") == [
        "```python\na\nb\n```",
        '<pre class="output">1 &lt; 2</pre>',
        '<pre class="output">&#x27;a&#x27;</pre>',
        '<figure class="output"><img alt="plot" src="data:image/png;base64,QUJD"></figure>',
        '<figure class="output"><svg>  </svg></figure>',
        '<div class="output"><b>  x</b></div>\n',
    ]
