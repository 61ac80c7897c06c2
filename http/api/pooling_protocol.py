"""The bodies of requests for embeddings and scores, and of their replies.

They are OpenAI's, vLLM's, and of rerankers Jina's and Cohere's. In requests every field may be
null, which means the same as leaving it out.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from paged.http.api.protocol import Usage


class PoolingRequest(Struct, frozen=True, kw_only=True):
    """What all of them share.

    Attributes:
        truncate_prompt_tokens: most tokens that a text keeps; -1 for as many as the model takes.
        timeout: seconds that the answer may take.
    """

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    timeout: float | None = None
    request_id: str | None = None


class EmbeddingRequest(PoolingRequest, frozen=True, kw_only=True):
    """POST /v1/embeddings. `input` is text, token ids, or a list of either."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None


class ScoreRequest(PoolingRequest, frozen=True, kw_only=True):
    """POST /score: the two sides of the pairs, by one of the names that they go by."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class Document(Struct, frozen=True):
    """A document that is to be ranked, or was."""

    text: str


class RerankRequest(PoolingRequest, frozen=True, kw_only=True):
    """POST /rerank. `top_n` of 0 means all."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None


class Embedding(Struct, frozen=True, kw_only=True):
    """The vector of the input at `index`: numbers, or their float32 bytes in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Score(Struct, frozen=True, kw_only=True):
    """The score of the pair at `index`."""

    index: int
    score: float
    object: str = "score"


class PooledList[T](Struct, frozen=True, kw_only=True):
    """The reply to a request for embeddings or scores."""

    id: str
    created: int
    model: str
    data: list[T]
    usage: Usage
    object: str = "list"


class RankedDocument(Struct, frozen=True, kw_only=True):
    """The document at `index` of the request."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(Struct, frozen=True, kw_only=True):
    """The reply to a request to rank documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: Usage
