"""What MkDocs is told beyond mkdocs.yml: pages that are not in docs/, notebooks, the sources that
pages link to, and that nothing on a page comes from elsewhere.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.theme.links import (
    DOCS,
    OTHERS,
    ROOT,
    for_site,
    in_repository,
    notebooks,
    site_path,
    sources_of,
)
from docs.theme.notebook_page import notebook_page

logger = logging.getLogger("mkdocs.hooks.paged")  # under strict, its warnings end the build
_PICTURE = re.compile(r"!\[(?P<alt>[^]]*)\]\((?P<target>pictures/[\w/]+\.svg)\)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}
# What a browser would fetch from elsewhere as soon as it opens the page.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\ssrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\shref=[\"']?(?:https?:)?//[^>]*>"
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out of the navigation what is not there, and put what it does not name at its end."""
    nav = [kept for entry in config.nav or () if (kept := _present(entry)) is not None]
    known = set(_leaves(nav))
    more = [path.name for path in sorted((ROOT / DOCS).glob("*.md")) if path.name not in known]
    config.nav = [*nav, {"More": more}] if more else nav
    return config


def _present(entry: Any) -> Any:
    """An entry of the navigation without what is not there; None if nothing is left."""
    if isinstance(entry, dict):
        [(title, value)] = entry.items()
        if isinstance(value, str):
            return {title: path} if (path := _present(value)) else None
        kept = [each for part in value if (each := _present(part)) is not None]
        return {title: kept} if kept else None
    if entry == "notebooks/":
        pages = [site_path(in_repository(path)) for path in notebooks()]
        return {"Notebooks": pages} if pages else None
    path = posixpath.normpath(posixpath.join(DOCS, entry))
    return site_path(path) if (ROOT / path).exists() else None


def _leaves(nav: Any) -> Iterator[str]:
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [value] if isinstance(value, str) else _leaves(value)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for path in OTHERS:
        files.append(_generated(config, path, (ROOT / path).read_text(encoding="utf-8")))
    for notebook in notebooks():
        files.append(_generated(config, in_repository(notebook), notebook_page(notebook)))
    pages = files.documentation_pages()
    waiting = [path for page in pages for path in sources_of(page.src_uri, page.content_string)]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            files.append(_generated(config, path, _source_page(path)))
            waiting += map(in_repository, _files_in(ROOT / path))
    return files


def _generated(config: MkDocsConfig, path: str, text: str) -> File:
    return File.generated(config, site_path(path), content=text)


def _files_in(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else []


def _source_page(path: str) -> str:
    """A file as it is, or a folder as the list of its files."""
    head = f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n# {path}\n\n"
    if inside := _files_in(ROOT / path):
        folder = posixpath.basename(path)
        return head + "".join(f"- [{each.name}]({folder}/{each.name}.md)\n" for each in inside)
    language = _LANGUAGES.get(Path(path).suffix, "text")
    code = (ROOT / path).read_text(encoding="utf-8")
    return f"{head}````````{language}\n{code}\n````````\n"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the site's pages, and put our own pictures into the page itself."""
    return _PICTURE.sub(_drawn, for_site(page.file.src_uri, markdown))


def _drawn(match: re.Match[str]) -> str:
    """The picture as a part of the page, so that its colours follow the page's."""
    svg = (ROOT / DOCS / match["target"]).read_text(encoding="utf-8")
    drawing = " ".join(line.strip() for line in svg.splitlines())
    return f'<figure class="drawn">{drawing}</figure>'


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Warn of what a browser would fetch from elsewhere."""
    for match in _FETCHED.finditer(output):
        logger.warning("%s fetches from elsewhere: %s", page.file.src_uri, match[0][:200])
    return output
