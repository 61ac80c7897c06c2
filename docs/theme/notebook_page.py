"""A notebook with its outputs as a page: Markdown, code, and what the code gave when it was run."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any


def notebook_page(path: Path) -> str:
    """The page; its first line is the notebook's first heading."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(_cell(cell) for cell in cells) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    shown = [_output(output) for output in cell["outputs"]]
    return "\n\n".join([f"```python\n{source}\n```", *filter(None, shown)])


def _output(output: dict[str, Any]) -> str:
    """What a cell gave, in the richest form that a page can show."""
    if output["output_type"] == "stream":
        return _text("".join(output["text"]))
    data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
    if drawing := data.get("image/svg+xml"):
        return f'<figure class="output">{_one_line(drawing[drawing.index("<svg") :])}</figure>'
    if picture := data.get("image/png"):
        source = f"data:image/png;base64,{picture.replace(chr(10), '')}"
        alt = html.escape(data.get("text/plain", "plot"))
        return f'<figure class="output"><img alt="{alt}" src="{source}"></figure>'
    if table := data.get("text/html"):
        return f'<div class="output">{_one_line(table)}</div>'
    return _text(data.get("text/plain", ""))


def _text(text: str) -> str:
    return f'<pre class="output">{html.escape(text.rstrip())}</pre>' if text.strip() else ""


def _one_line(markup: str) -> str:
    """Markdown ends a piece of HTML at its first empty line."""
    return " ".join(line.strip() for line in markup.splitlines())
