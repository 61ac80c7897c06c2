"""Where the site has what the repository has. Pages are written for a code host, with links that
are paths in the repository; on the site a page elsewhere, a notebook or a source has another path.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = "docs"
OTHERS = ("CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/RESULTS.md")
"""Pages that are not in docs/, by their paths in the repository."""
SOURCES = "source/"
"""Where the site has files that pages link to, and that are no pages."""

_LINK = re.compile(r"(?P<name>\[[\w/]+\.md)?\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_HEADING = re.compile(r"^# (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def notebooks() -> list[Path]:
    """All that are committed, by name."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def in_repository(path: Path) -> str:
    """A path from the repository's root, with slashes."""
    return path.relative_to(ROOT).as_posix()


def site_path(path: str) -> str:
    """Where the site has what the repository has at `path`."""
    if path == "README.md":
        return "index.md"
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if path.endswith(".ipynb"):
        return f"{path.removesuffix('.ipynb')}.md"
    return path if path in OTHERS else f"{SOURCES}{path}.md"


def repository_path(uri: str) -> str:
    """What the links on a page of the site start from."""
    if uri in OTHERS or uri.startswith(("notebooks/", SOURCES)):
        return uri
    return f"{DOCS}/{uri}"


def sources_of(uri: str, text: str) -> list[str]:
    """The files and folders in the repository that a page links to and that are no pages."""
    targets: list[str | None] = []

    def note(match: re.Match[str]) -> str:
        targets.append(_target(uri, match["target"]))
        return match[0]

    _with_links(text, note)
    return [path for path in targets if path and site_path(path).startswith(SOURCES)]


def for_site(uri: str, text: str) -> str:
    """A page's text with links that lead to the site's pages, and name titles in place of files."""

    def change(match: re.Match[str]) -> str:
        path = _target(uri, match["target"])
        if path is None:
            return match[0]
        target = posixpath.relpath(site_path(path), posixpath.dirname(uri))
        name = f"[{_title(path)}" if match["name"] else ""
        return f"{name}]({target}{match['anchor'] or ''}"

    return _with_links(text, change)


def _title(path: str) -> str:
    found = _HEADING.search((ROOT / path).read_text(encoding="utf-8"))
    assert found is not None, f"{path} has no heading"
    return found[1]


def _target(uri: str, target: str) -> str | None:
    """What a link on a page leads to in the repository; None if it leads elsewhere."""
    if ":" in target or uri.startswith(SOURCES):
        return None
    folder = posixpath.dirname(repository_path(uri))
    path = posixpath.normpath(posixpath.join(folder, target))
    return path if (ROOT / path).exists() else None


def _with_links(text: str, change: Callable[[re.Match[str]], str]) -> str:
    """The text with each link that is not in code changed."""
    parts, end = [], 0
    for fence in _FENCED.finditer(text):
        parts += [_LINK.sub(change, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(change, text[end:])])
