"""LangChain: python langchain_client.py URL (of a model that talks) URL (of one for vectors)."""

import asyncio
import sys

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

text_url, vectors_url = sys.argv[1:]
chat = ChatOpenAI(base_url=f"{text_url}/v1", api_key=SecretStr("any"), model="tiny", max_retries=0)


class Person(BaseModel):
    name: str
    age: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"cold in {city}"


def talks() -> None:
    reply = chat.invoke("Hi")
    assert reply.content == "Hello!", reply
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["output_tokens"] == 6
    assert reply.response_metadata["finish_reason"] == "stop"
    assert [each.content for each in chat.batch(["Hi"] * 5)] == ["Hello!"] * 5
    logprobs = chat.bind(logprobs=True).invoke("Hi").response_metadata["logprobs"]
    assert len(logprobs["content"]) == 6


def streams() -> None:
    chunks = list(chat.stream("Hi", stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == "Hello!"
    assert (
        sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 6
    )


async def asynchronously() -> None:
    assert (await chat.ainvoke("Hi")).content == "Hello!"
    assert "".join([str(chunk.content) async for chunk in chat.astream("Hi")]) == "Hello!"


def structured() -> None:
    for method in ("json_schema", "json_mode", "function_calling"):
        asked = chat.with_structured_output(Person, method=method)
        assert asked.invoke("Who, as JSON?") == Person(name="Ada", age=36), method


def calls() -> None:
    with_tools = chat.bind_tools([weather])
    reply = with_tools.invoke("How is it in Oslo?")
    assert isinstance(reply, AIMessage)
    [call] = reply.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    last = with_tools.invoke([HumanMessage("How is it in Oslo?"), reply, result])
    assert last.content == "It is cold.", last
    gathered = None
    for chunk in with_tools.stream("How is it in Oslo?"):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered is not None
    assert gathered.tool_calls[0]["args"] == {"city": "Oslo"}


def completions() -> None:
    model = OpenAI(base_url=f"{text_url}/v1", api_key=SecretStr("any"), model="tiny", max_retries=0)
    assert model.invoke("a") == "Hello!"
    assert "".join(model.stream("a")) == "Hello!"


def embeddings() -> None:
    model = OpenAIEmbeddings(
        base_url=f"{vectors_url}/v1",
        api_key=SecretStr("any"),
        model="tiny",
        check_embedding_ctx_length=False,  # else it sends ids of OpenAI's own tokenizer
    )
    vectors = model.embed_documents(["a", "b"])
    assert len(vectors) == 2
    assert vectors[0] == model.embed_query("a")


for part in (talks, streams, structured, calls, completions, embeddings):
    part()
asyncio.run(asynchronously())
