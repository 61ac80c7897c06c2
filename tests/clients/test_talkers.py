"""Clients of other makers understand every reply; what they check is in the files named here."""

from pathlib import Path

import pytest

from tests.clients.talking import needs_node, needs_python, talk

pytestmark = pytest.mark.clients


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("openai_node.cjs", marks=needs_node),
        pytest.param("langchain_client.py", marks=needs_python),
        pytest.param("litellm_client.py", marks=needs_python),
    ],
)
def test_all_of_it(tmp_path: Path, text_url: str, vectors_url: str, script: str) -> None:
    talk(tmp_path, script, text_url, vectors_url)


@needs_python
@pytest.mark.parametrize("server", ["text_url", "vectors_url"])
def test_what_the_description_allows(
    tmp_path: Path, request: pytest.FixtureRequest, server: str
) -> None:
    """Schemathesis sends what /openapi.json allows and forbids, and holds replies to it."""
    talk(tmp_path, "schemathesis_client.py", request.getfixturevalue(server))
