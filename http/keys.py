"""The keys of a file: who may ask, how much at once, and how many tokens a minute.

The file holds a key's SHA-256 and never the key, as JSON lines or as a list in YAML:

    {"name": "alice", "sha256": "9f86...", "max_concurrent": 8, "tokens_per_minute": 60000}

It is read again when it has changed, and on SIGHUP. What cannot be read then changes nothing.
"""

from __future__ import annotations

import argparse
import hmac
import json
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from paged.http.options import HashKeyOptions
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 1.0
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key of the file.

    Attributes:
        name: of whoever has it; requests of entries of one name count together.
        sha256: of the key, in hexadecimal.
        max_concurrent: requests that run at once; None for any number.
        tokens_per_minute: of prompts and outputs; None for any number.
        admin: whether it is good for what is for admins, too.
    """

    name: _Name
    sha256: _Digest
    max_concurrent: _Count | None = None
    tokens_per_minute: _Count | None = None
    admin: bool = False


class KeyRing:
    """The keys of a file, as it is now.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = _version(path)
        self._entries = _by_digest(read_keys(path))
        self._looked = time.monotonic()

    def find(self, digests: Sequence[bytes]) -> KeyEntry | None:
        """The entry of a key with one of these digests.

        All are compared, whichever is right, so that the time taken says nothing about them.
        """
        self._look()
        found = None
        for known, entry in self._entries:
            for digest in digests:
                if hmac.compare_digest(digest, known):
                    found = entry
        return found

    def reload(self) -> None:
        """Read the file again; what is wrong with it goes to the log."""
        self._version = _version(self._path)
        try:
            self._entries = _by_digest(read_keys(self._path))
        except ConfigError as error:
            logger.error("The keys stay as they were: %s", error)
        else:
            logger.info("%d keys read from %s", len(self._entries), self._path)

    def _look(self) -> None:
        """Read the file again if it has changed."""
        now = time.monotonic()
        if now - self._looked > _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            if _version(self._path) != self._version:
                self.reload()


def _version(path: Path) -> tuple[int, ...]:
    """What differs when a file has changed; () if there is none."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _by_digest(entries: Sequence[KeyEntry]) -> list[tuple[bytes, KeyEntry]]:
    return [(bytes.fromhex(entry.sha256), entry) for entry in entries]


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """The entries of a file. Raises ConfigError if there are none, or one is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        values = _values(text)
        entries = tuple(msgspec.convert(each, KeyEntry) for each in values)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--api-keys-file {path}: {_in_a_line(error)}") from error
    if not entries:
        raise ConfigError(f"--api-keys-file {path} holds no key: `paged hash-key` makes an entry")
    digest, count = Counter(entry.sha256 for entry in entries).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"--api-keys-file {path} holds the key {digest[:12]}... {count} times")
    return entries


def _values(text: str) -> list[Any]:
    """Objects, one a line, or the items of a list."""
    lines = [line for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
    if lines and all(line.lstrip().startswith("{") for line in lines):
        return [json.loads(line) for line in lines]
    values = yaml.safe_load(text)
    if not isinstance(values, list | None):
        raise ValueError("it must hold a JSON object a line, or a list in YAML")
    return values or []


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def hash_key(args: argparse.Namespace) -> int:
    """`paged hash-key`: print the entry of a key that is read, or made and told."""
    options = read_flags(HashKeyOptions, args)
    key = sys.stdin.readline().strip() if options.stdin else f"sk-{secrets.token_urlsafe(32)}"
    if not key:
        raise ConfigError("--stdin wants the key as a line of standard input")
    if not options.stdin:
        sys.stderr.write(f"The key, which is kept nowhere: {key}\n")
    entry = {
        "name": options.name,
        "sha256": sha256(key.encode()).hexdigest(),
        "max_concurrent": options.max_concurrent,
        "tokens_per_minute": options.tokens_per_minute,
        "admin": options.admin or None,
    }
    given = {name: value for name, value in entry.items() if value is not None}
    try:
        msgspec.convert(given, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"such an entry cannot be: {error}") from error
    sys.stdout.write(json.dumps(given) + "\n")
    return 0
