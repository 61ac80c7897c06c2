"""The pictures of the documentation: `python -m docs.theme.pictures` writes them anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.theme.drawing import COLOURS, Drawing
from docs.theme.fleet_plots import fleet_routing, fleet_steps, fleet_streams

FOLDER = Path(__file__).parents[1] / "pictures"


def waste() -> Drawing:
    """Memory of four sequences, reserved for the longest or taken page by page."""
    drawing = Drawing(720, 326, "Memory reserved for the longest answer, and taken by the page")
    lengths = (11, 5, 17, 3)
    drawing.text(20, 28, "Reserved for the longest possible answer", "title")
    for row, length in enumerate(lengths):
        drawing.box(20, 40 + row * 24, 680, 18, "empty")
        drawing.box(20, 40 + row * 24, length * 17, 18, COLOURS[row])
    drawing.text(20, 154, "Four sequences fill the memory; most of it holds nothing.", "small soft")
    drawing.text(20, 190, "Taken by the page", "title")
    for number, (kind, filled) in enumerate(_paged(lengths)):
        x, y = 20 + number % 20 * 34, 202 + number // 20 * 24
        drawing.box(x, y, 30, 18, "empty")
        if filled:
            drawing.box(x, y, 30 * filled, 18, kind)
    caption = "The same four in the same memory. Only the end of each one's last page is lost."
    drawing.text(20, 314, caption, "small soft")
    return drawing


def _paged(lengths: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    """Colour and filling of the pages of sequences that grew in turns, and then of free ones."""
    pages = [-(-length // 2) for length in lengths]
    for turn in range(max(pages)):
        for row, count in enumerate(pages):
            if turn < count:
                is_half = turn == count - 1 and lengths[row] % 2
                yield COLOURS[row], 0.5 if is_half else 1.0
    yield from (("empty", 0.0) for _ in range(80 - sum(pages)))


def page_table() -> Drawing:
    """Two sequences that begin alike, their page tables, and the pool."""
    drawing = Drawing(720, 330, "Page tables of two sequences lead to pages anywhere in the pool")
    tables = {"A": (["The sky", "is blue", "because", "light"], [7, 2, 9, 4], "blue")}
    tables["B"] = (["The sky", "is blue", "at noon"], [7, 2, 11], "orange")
    for number, (name, (words, pages, kind)) in enumerate(tables.items()):
        top = 20 + number * 168
        drawing.text(20, top + 14, f"Sequence {name}", "title")
        drawing.text(20, top + 32, "page table", "small soft")
        for row, (word, page) in enumerate(zip(words, pages, strict=True)):
            y = top + 42 + row * 25
            shared = row < 2
            drawing.labelled(20, y, 92, 20, "green" if shared else kind, word, "on small")
            drawing.text(122, y + 14.5, f"page {page}", "small mono")
    drawing.text(330, 34, "The pool", "title")
    drawing.text(330, 52, "16 tokens a page, in any order", "small soft")
    held = {7: ("green", "The sky"), 2: ("green", "is blue"), 9: ("blue", "because")}
    held |= {4: ("blue", "light"), 11: ("orange", "at noon")}
    for page in range(12):
        x, y = 330 + page % 4 * 94, 64 + page // 4 * 58
        kind, word = held.get(page, ("empty", ""))
        drawing.box(x, y, 84, 48, kind)
        drawing.text(x + 7, y + 15, str(page), "small mono on" if word else "small mono soft")
        drawing.text(x + 42, y + 34, word or "free", "on" if word else "soft", "middle")
    drawing.text(262, 134, "leads to", "small soft", "middle")
    drawing.arrow((214, 146), (310, 146))
    meaning = {"green": "shared by both", "blue": "A alone", "orange": "B alone"}
    drawing.legend(330, 266, meaning, 118)
    return drawing


def batching() -> Drawing:
    """Four slots over time, filled in batches or as they become free."""
    drawing = Drawing(720, 330, "Static batches wait for their longest; continuous ones never wait")
    lengths = (4, 9, 3, 6, 5, 4, 7, 3, 5, 4)
    drawing.text(20, 26, "Static: the next batch begins when all of this one has ended", "title")
    start = 0
    for first in range(0, len(lengths), 4):
        batch = (*lengths[first : first + 4], 0, 0)[:4]
        for slot, length in enumerate(batch):
            if length:
                _run(drawing, 40, slot, start, length, first + slot)
            _idle(drawing, 40, slot, start + length, start + max(batch))
        start += max(batch)
    drawing.text(20, 176, "Continuous: whoever waits takes the slot that becomes free", "title")
    free = [0, 0, 0, 0]
    for number, length in enumerate(lengths):
        slot = free.index(min(free))
        _run(drawing, 190, slot, free[slot], length, number)
        free[slot] += length
    drawing.arrow((20, 306), (696, 306))
    drawing.text(696, 322, "steps", "small soft", "end")
    drawing.text(
        20,
        322,
        "rows are slots, numbers requests, dashed is lost time",
        "small soft",
    )
    return drawing


_STEP = 32


def _run(drawing: Drawing, top: float, slot: int, start: int, length: int, number: int) -> None:
    x, y = 20 + start * _STEP, top + slot * 26
    kind = COLOURS[number % 4]
    drawing.labelled(x + 1, y, length * _STEP - 2, 20, kind, str(number + 1), "on small")


def _idle(drawing: Drawing, top: float, slot: int, start: int, end: int) -> None:
    if end > start:
        x, y = 20 + start * _STEP, top + slot * 26
        drawing.box(x + 2, y + 1, (end - start) * _STEP - 4, 18, "empty")


def chunks() -> Drawing:
    """Steps with a long prompt in one piece, and in chunks."""
    drawing = Drawing(720, 316, "A long prompt in one step, and in chunks beside other sequences")
    drawing.text(20, 26, "In one piece: those that decode wait for all of the prompt", "title")
    _steps(drawing, 40, [(34, 0), (34, 0), (34, 344), (34, 0), (34, 0)])
    drawing.text(20, 166, "In chunks: every step has room for them", "title")
    _steps(drawing, 180, [(34, 0), (34, 86), (34, 86), (34, 86), (34, 86), (34, 0)])
    drawing.arrow((20, 280), (696, 280))
    drawing.text(696, 298, "time", "small soft", "end")
    meaning = {"blue": "one token of each sequence that decodes", "orange": "tokens of the prompt"}
    drawing.legend(20, 302, meaning, 262)
    return drawing


def _steps(drawing: Drawing, top: float, steps: list[tuple[int, int]]) -> None:
    """Steps of (decode, prompt) widths in a row; each ends with a tick, when tokens come out."""
    x = 20.0
    for decode, prompt in steps:
        drawing.box(x, top, decode, 56, "blue")
        if prompt:
            drawing.box(x + decode + 1, top, prompt - 1, 56, "orange")
        x += decode + prompt
        drawing.line((x + 3, top - 4), (x + 3, top + 60), kind="arrow")
        x += 7
    drawing.text(20, top + 78, "tokens come out at each line", "small soft")


def prefix() -> Drawing:
    """A tree of pages: what begins alike is stored once."""
    drawing = Drawing(720, 286, "Prompts that begin alike share the pages of their beginning")
    drawing.labelled(20, 116, 118, 34, "green", "You are a careful")
    drawing.labelled(176, 116, 118, 34, "green", "librarian who")
    rows = (("blue", "knows poems.", "Which of the"), ("orange", "knows maps.", "Where is"))
    for number, (kind, first, second) in enumerate(rows):
        y = 56 + number * 120
        drawing.labelled(332, y, 118, 34, kind, first)
        drawing.labelled(488, y, 118, 34, kind, second)
        drawing.arrow((294, 133), (313, 133), (313, y + 17), (331, y + 17))
        drawing.arrow((450, y + 17), (487, y + 17))
        drawing.box(644, y, 56, 34, "empty")
        drawing.arrow((606, y + 17), (643, y + 17))
        drawing.text(672, y + 52, "filling", "small soft", "middle")
    drawing.arrow((138, 133), (175, 133))
    drawing.text(
        20, 30, "A full page is known by a hash of its tokens and of the page before", "title"
    )
    drawing.text(79, 168, "hash of 16 tokens", "small soft", "middle")
    drawing.text(235, 168, "hash of 16 and", "small soft", "middle")
    drawing.text(235, 182, "the one before", "small soft", "middle")
    meaning = {"green": "stored and computed once", "blue": "one request's", "orange": "another's"}
    drawing.legend(20, 262, meaning, 190)
    return drawing


def buckets() -> Drawing:
    """A batch padded to the next compiled shape."""
    drawing = Drawing(720, 214, "A step of 50 tokens runs the program that was compiled for 64")
    drawing.text(20, 26, "Programs compiled at the start, by the tokens of a step", "title")
    x = 20.0
    for tokens in (16, 64, 192, 256):
        width = 40 + tokens * 0.62
        chosen = tokens == 64
        drawing.labelled(
            x, 40, width, 30, "blue" if chosen else "pale", str(tokens), "on" if chosen else ""
        )
        if chosen:
            drawing.arrow((x + width / 2, 108), (x + width / 2, 74))
        x += width + 8
    drawing.text(x + 2, 60, "…", "soft")
    drawing.text(20, 104, "This step", "title")
    drawing.labelled(20, 116, 250, 30, "orange", "a chunk of 40 tokens")
    drawing.labelled(272, 116, 62, 30, "blue", "10 decode", "on small")
    drawing.box(336, 117, 86, 28, "empty")
    drawing.text(379, 135, "14 padded", "small soft", "middle")
    drawing.text(
        20,
        178,
        "50 tokens go into the shape of 64. A server compiles nothing while it serves;",
        "small soft",
    )
    drawing.text(20, 194, "places without a token are computed and thrown away.", "small soft")
    return drawing


def overlap() -> Drawing:
    """Host and device side by side: the next step is enqueued before the last is read."""
    drawing = Drawing(720, 232, "While the device computes one step the host prepares the next")
    drawing.text(20, 26, "The device never waits for the host", "title")
    drawing.text(20, 74, "host")
    drawing.text(20, 136, "device")
    for step in range(4):
        x = 84 + step * 140
        drawing.labelled(x, 54, 62, 30, "green", f"plan {step + 1}", "on small")
        drawing.labelled(x + 66, 54, 64, 30, "violet", f"read {step}", "on small")
        drawing.labelled(x + 62, 116, 138, 30, "blue", f"step {step + 1}")
        drawing.arrow((x + 62, 84), (x + 62, 115))
    drawing.arrow((84, 172), (706, 172))
    drawing.text(706, 188, "time", "small soft", "end")
    meaning = {
        "green": "schedule, pack, send",
        "blue": "one compiled program",
        "violet": "tokens to text",
    }
    drawing.legend(84, 214, meaning, 180)
    return drawing


def house() -> Drawing:
    """Four floors and a request's way through them."""
    drawing = Drawing(720, 372, "A request's way through the four floors of the house")
    floors = (
        ("http/", "the doors"),
        ("runtime/", "the host side"),
        ("models/", "pure functions"),
        ("paged/", "the ground floor"),
    )
    for number, (folder, meaning) in enumerate(floors):
        y = 20 + number * 88
        drawing.box(20, y, 680, 76, "paper", 6)
        drawing.text(34, y + 34, f"{4 - number} · {folder}", "title")
        drawing.text(34, y + 54, meaning, "small soft")
    parts = {
        "routes": (190, 39, 490, "violet", "routes, streams, command line"),
        "schedule": (190, 127, 114, "green", "1 schedule"),
        "pack": (316, 127, 92, "green", "2 pack"),
        "step": (420, 127, 116, "blue", "3 step, 4 read"),
        "output": (548, 127, 132, "violet", "5 output"),
        "family": (420, 215, 260, "blue", "layers over weights"),
        "pool": (190, 303, 218, "green", "page pool, prefix cache"),
        "attention": (420, 303, 260, "blue", "KV cache, attention over pages"),
    }
    for x, y, width, kind, label in parts.values():
        drawing.labelled(x, y, width, 38, kind, label)
    drawing.arrow((247, 77), (247, 126))
    drawing.arrow((304, 146), (315, 146))
    drawing.arrow((408, 146), (419, 146))
    drawing.arrow((536, 146), (547, 146))
    drawing.arrow((614, 127), (614, 78))
    drawing.arrow((247, 165), (247, 302))
    drawing.arrow((478, 165), (478, 214))
    drawing.arrow((550, 253), (550, 302))
    return drawing


DIAGRAMS = (waste, page_table, batching, chunks, prefix, buckets, overlap, house)
PLOTS = (fleet_steps, fleet_streams, fleet_routing)


def files() -> dict[Path, str]:
    """Each picture's file and content."""
    return {FOLDER / f"{picture.__name__}.svg": picture().svg() for picture in (*DIAGRAMS, *PLOTS)}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
