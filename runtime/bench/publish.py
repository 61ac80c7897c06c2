"""Where the results of a benchmark go: the terminal, a file for programs, a page for people."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paged.runtime.bench.html_report import html_report
from paged.runtime.bench.options import OutputOptions
from paged.runtime.bench.results import BenchResult, as_json
from paged.runtime.errors import ConfigError


def publish(
    lines: Iterable[str],
    result: BenchResult,
    options: OutputOptions,
    flat: Mapping[str, Any] | None = None,
) -> None:
    """Print the lines, and write the files that are asked for, even if nobody reads the lines.

    Args:
        flat: what stands beside the result in its file.

    Raises:
        ConfigError: a file cannot be written.
    """
    try:
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()
    finally:
        _write_files(result, options, flat or {})


def _write_files(result: BenchResult, options: OutputOptions, flat: Mapping[str, Any]) -> None:
    if options.output_json:
        text = json.dumps({**flat, **as_json(result)}, indent=2)
        write_text(Path(options.output_json), text + "\n")
    if options.html:
        write_text(Path(options.html), html_report([(result.label, result)]))


def check_writable(*paths: str | Path | None) -> None:
    """Find out before a run, which may take long, that its results have no place to go.

    Raises:
        ConfigError: one of the files (those that are None apart) cannot be written.
    """
    for path in [Path(each) for each in paths if each is not None]:
        if not path.parent.is_dir():
            trouble = f"there is no folder {path.parent}"
        elif path.is_dir():
            trouble = "it is a folder"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            trouble = "permission denied"
        else:
            continue
        raise ConfigError(f"The results cannot be written to {path}: {trouble}")


def write_text(path: Path, text: str) -> None:
    """Write a file. Raises ConfigError if that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The results cannot be written: {error}") from error
