"""No body whatever, however odd its values, makes the server fail."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from paged.http.api.anthropic.protocol import MESSAGES_NEUTRAL, InputBlock, MessagesRequest
from paged.http.api.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, Neutral
from paged.http.api.protocol import ChatRequest, CompletionRequest, Message
from paged.http.api.responses.protocol import RESPONSES_NEUTRAL, InputItem, ResponsesRequest

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, 2, -1, 2**31, 2**63, 10**400]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["", "none", "auto", "text", "user", "5"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "text", "5", "a"]), inner, max_size=3),
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"])},
        optional={name: VALUES for name in Message.__struct_fields__ if name != "role"},
    ),
    max_size=3,
)

ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "reasoning", "function_call", "x"])},
        optional={
            "role": st.sampled_from(["system", "user", "assistant", "x"]),
            **{
                name: VALUES for name in InputItem.__struct_fields__ if name not in ("type", "role")
            },
        },
    ),
    max_size=3,
)
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "x"])},
        optional={name: VALUES for name in InputBlock.__struct_fields__ if name != "type"},
    ),
    max_size=3,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": BLOCKS | VALUES}
    ),
    max_size=3,
)


def bodies(known: tuple[str, ...], neutral: Neutral, **required: Any) -> Any:
    """Bodies with a few fields of any values, so that some get far."""
    names = sorted({*known, *neutral, "unknown"} - required.keys())
    few = st.lists(st.sampled_from(names), max_size=4, unique=True)
    return few.flatmap(
        lambda chosen: st.fixed_dictionaries(required | dict.fromkeys(chosen, VALUES))
    )


COMPLETIONS = bodies(
    CompletionRequest.__struct_fields__, COMPLETION_NEUTRAL, prompt=st.just("a") | VALUES
)
CHATS = bodies(ChatRequest.__struct_fields__, CHAT_NEUTRAL, messages=MESSAGES | VALUES)

RESPONSES = bodies(
    ResponsesRequest.__struct_fields__, RESPONSES_NEUTRAL, input=st.just("a") | ITEMS | VALUES
)
MESSAGE_REPLIES = bodies(
    MessagesRequest.__struct_fields__,
    MESSAGES_NEUTRAL,
    messages=TURNS | VALUES,
    max_tokens=st.just(5) | VALUES,
)


@pytest.mark.parametrize(
    ("path", "strategy"),
    [
        ("completions", COMPLETIONS),
        ("chat/completions", CHATS),
        ("responses", RESPONSES),
        ("messages", MESSAGE_REPLIES),
        ("messages/count_tokens", MESSAGE_REPLIES),
    ],
)
def test_it_is_answered_or_refused(client: TestClient, path: str, strategy: Any) -> None:
    @settings(
        max_examples=200,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(strategy)
    def answered(body: Any) -> None:
        assert client.post(f"/v1/{path}", json=body).status_code in (200, 400, 404)

    answered()
