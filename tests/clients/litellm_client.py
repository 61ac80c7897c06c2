"""LiteLLM: python litellm_client.py URL (of a model that talks) URL (of one for vectors)."""

import asyncio
import sys
from typing import Any

import litellm
from litellm import acompletion, completion, embedding, text_completion

text_url, vectors_url = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def talks(how: dict[str, Any]) -> None:
    reply = completion(messages=MESSAGES, max_tokens=20, temperature=0.5, **how)
    assert reply.choices[0].message.content == "Hello!", reply
    assert reply.usage.completion_tokens == 6
    chunks = list(completion(messages=MESSAGES, stream=True, **how))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello!"


def calls(how: dict[str, Any]) -> None:
    reply = completion(messages=MESSAGES, tools=[TOOL], tool_choice="auto", **how)
    message = reply.choices[0].message
    [call] = message.tool_calls
    assert call.function.arguments == '{"city": "Oslo"}'
    result = {"role": "tool", "tool_call_id": call.id, "content": "cold"}
    said = message.model_dump(exclude_none=True)
    last = completion(messages=[*MESSAGES, said, result], tools=[TOOL], **how)
    assert last.choices[0].message.content == "It is cold."
    chunks = list(completion(messages=MESSAGES, tools=[TOOL], stream=True, **how))
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.tool_calls[0].function.name == "weather"


def structured(how: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    reply = completion(messages=MESSAGES, response_format=wanted, **how)
    assert reply.choices[0].message.content == '{"name": "Ada", "age": 36}'


async def asynchronously(how: dict[str, Any]) -> None:
    reply = await acompletion(messages=MESSAGES, **how)
    assert reply.choices[0].message.content == "Hello!"
    text = ""
    async for chunk in await acompletion(messages=MESSAGES, stream=True, **how):
        text += chunk.choices[0].delta.content or ""
    assert text == "Hello!"


def errors(how: dict[str, Any]) -> None:
    refused = None
    try:
        completion(messages=MESSAGES, temperature=-1, **how)
    except litellm.BadRequestError as error:
        refused = str(error)
    assert refused is not None
    assert "temperature must be" in refused


for prefix in ("openai", "hosted_vllm"):
    how = {"model": f"{prefix}/tiny", "api_base": f"{text_url}/v1", "api_key": "any"}
    for part in (talks, calls, structured, errors):
        part(how)
    asyncio.run(asynchronously(how))
    vectors = {"model": f"{prefix}/tiny", "api_base": f"{vectors_url}/v1", "api_key": "any"}
    reply = embedding(input=["a", "b"], encoding_format="float", **vectors)
    assert len(reply.data) == 2
    assert len(reply.data[0]["embedding"]) > 1
how = {"model": "text-completion-openai/tiny", "api_base": f"{text_url}/v1", "api_key": "any"}
assert text_completion(prompt="a", **how).choices[0].text == "Hello!"
