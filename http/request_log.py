"""The log's line on each request that has ended: ids, lengths, times, and why it ended."""

from __future__ import annotations

import logging
from typing import Any

from paged.http.engine import Tokenizer
from paged.http.request_report import RequestReport

logger = logging.getLogger(__name__)


class RequestLog:
    """Logs a line for each request.

    Args:
        tokenizer: makes text of prompts.
        max_length: characters that are shown of a prompt and of each output. None shows no prompt,
            and outputs whole.
        outputs: whether outputs are shown.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, max_length: int | None = None, outputs: bool = False
    ) -> None:
        self.wants_texts = outputs
        self._tokenizer = tokenizer
        self._max_length = max_length

    def report(self, report: RequestReport) -> None:
        fields = fields_of(report)
        if self._max_length:
            fields["prompt"] = self._prompt(report.asked.prompt)
        if self.wants_texts:
            fields["outputs"] = [text[: self._max_length] for text in report.texts]
        logger.info("%s", line(fields), extra={"fields": fields})

    def _prompt(self, prompt: list[int]) -> str | list[int]:
        """Its beginning; token ids without a tokenizer."""
        beginning = prompt[: self._max_length]  # a token is a character or more
        if self._tokenizer is None:
            return beginning
        return self._tokenizer.decode(beginning, skip_special_tokens=False)[: self._max_length]


def fields_of(report: RequestReport) -> dict[str, Any]:
    """What a log of lines in JSON says; times in milliseconds, without those that never came."""
    asked, times = report.asked, report.times
    spans = {
        "queue_ms": (times.arrival_time, times.first_scheduled_time),
        "first_token_ms": (times.arrival_time, times.first_token_time),
        "total_ms": (times.arrival_time, times.finished_time),
    }
    return {
        "request_id": asked.request_id,
        "model": asked.model,
        "prompt_tokens": len(asked.prompt),
        "cached_tokens": report.num_cached_tokens,
        "generated_tokens": list(report.num_tokens),
        "finish_reasons": list(report.reasons),
        **{
            name: round(1e3 * (end - start), 3)
            for name, (start, end) in spans.items()
            if start is not None and end is not None
        },
    }


def line(fields: dict[str, Any]) -> str:
    """The same for people."""
    times = {"queue_ms": "queued", "first_token_ms": "first token after", "total_ms": "took"}
    spans = [f"{text} {fields[name]:.1f} ms" for name, text in times.items() if name in fields]
    texts = [f"{name} {fields[name]!r}" for name in ("prompt", "outputs") if name in fields]
    generated = "+".join(map(str, fields["generated_tokens"])) or "0"
    parts = [
        f"{fields['request_id']}: {fields['model']}",
        f"{fields['prompt_tokens']} prompt tokens ({fields['cached_tokens']} cached)",
        f"{generated} generated",
        "+".join(fields["finish_reasons"]),
        *spans,
        *texts,
    ]
    return ", ".join(parts)
