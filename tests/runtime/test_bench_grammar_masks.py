"""`benchmarks/grammar_masks.py`: every form can be followed, and takes time."""

from pathlib import Path

from benchmarks.grammar_masks import FORMS, measure, write_model
from paged.models.loading import resolve_model
from paged.runtime.grammar import grammar_of
from paged.runtime.guides import Grammars
from paged.runtime.structured_outputs import StructuredOutputsParams

VOCABULARY = 2048


def test_every_form_can_be_followed(tmp_path: Path) -> None:
    write_model(tmp_path, VOCABULARY)
    tokenizer = resolve_model(str(tmp_path), load_format="dummy").tokenizer()
    assert tokenizer.vocab_size == VOCABULARY
    grammars = Grammars(lambda: tokenizer, VOCABULARY, frozenset({0}))
    for form in FORMS.values():
        grammar = grammar_of(StructuredOutputsParams(**form), tokenizer, VOCABULARY)
        assert min(measure(grammars, grammar, sequences=2)) > 0
    grammars.close()
