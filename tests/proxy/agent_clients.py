"""Agents as people write them, one function per client library or command-line agent: ten turns with a proxy.

`agent_clients.py NAME URL KEY stream|whole` runs in the environment that has the libraries; URL ends in /v1. The model
calls the tool `weather`, or a shell, nine times, then answers. The last line printed is the client's version.
Command-line agents run in an empty home without a network.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ASKED = "How is the weather, day by day?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DESCRIBED = {"name": "weather", "description": "Weather of a city.", "parameters": PARAMETERS}
NUM_TURNS = 10


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: where.
    """
    return f"{city}: mild"


def openai_chat(url: str, key: str, streams: bool) -> str:
    import openai

    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    tools: Any = [{"type": "function", "function": DESCRIBED}]
    for _ in range(NUM_TURNS):
        asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": tools}
        if streams:
            with client.chat.completions.stream(**asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls or ():
            said = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return version("openai")


def openai_responses(url: str, key: str, streams: bool) -> str:
    import openai

    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    items: list[Any] = [{"role": "user", "content": ASKED}]
    tools: Any = [{"type": "function", **DESCRIBED}]
    for _ in range(NUM_TURNS):
        asked: dict[str, Any] = {"model": "m", "input": items, "tools": tools, "store": False}
        if streams:
            with client.responses.stream(**asked) as stream:
                answer = stream.get_final_response()
        else:
            answer = client.responses.create(**asked)
        for item in answer.output:
            items.append(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}))
            if item.type == "function_call":
                said = weather(**json.loads(item.arguments))
                items.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": said}
                )
    return version("openai")


def anthropic_messages(url: str, key: str, streams: bool) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    tools: Any = [
        {"name": "weather", "description": "Weather of a city.", "input_schema": PARAMETERS}
    ]
    for _ in range(NUM_TURNS):
        asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": tools}
        if streams:
            with client.messages.stream(**asked, max_tokens=2000) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked, max_tokens=2000)
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if results:
            messages.append({"role": "user", "content": results})
    return version("anthropic")


def litellm_completion(url: str, key: str, streams: bool) -> str:
    import litellm

    messages: list[Any] = [{"role": "user", "content": ASKED}]
    tools = [{"type": "function", "function": DESCRIBED}]
    for _ in range(NUM_TURNS):
        asked = {"model": "openai/m", "messages": messages, "tools": tools}
        answer = litellm.completion(**asked, api_base=url, api_key=key, stream=streams)
        if streams:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            said = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return version("litellm")


def openai_agents(url: str, key: str, streams: bool) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    model = agents.OpenAIChatCompletionsModel(model="m", openai_client=client)
    tools = [agents.function_tool(weather)]
    agent = agents.Agent(name="a", instructions="Help.", model=model, tools=tools)

    async def run() -> None:
        if not streams:
            await agents.Runner.run(agent, ASKED, max_turns=NUM_TURNS)
            return
        async for _ in agents.Runner.run_streamed(
            agent, ASKED, max_turns=NUM_TURNS
        ).stream_events():
            pass

    asyncio.run(run())
    return version("openai-agents")


def langchain_openai(url: str, key: str, streams: bool) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(model="m", base_url=url, api_key=key, max_retries=0, streaming=streams)
    model = model.bind_tools([{"type": "function", "function": DESCRIBED}])
    messages: list[Any] = [HumanMessage(ASKED)]
    for _ in range(NUM_TURNS):
        answer = model.invoke(messages)
        messages.append(answer)
        for call in answer.tool_calls:
            said = weather(**call["args"])
            messages.append(ToolMessage(said, tool_call_id=call["id"]))
    return version("langchain-openai")


def pydantic_ai(url: str, key: str, streams: bool) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key=key))
    agent = Agent(model, tools=[weather])

    async def drain(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    async def run() -> None:
        if not streams:
            await agent.run(ASKED)
            return
        await agent.run(ASKED, event_stream_handler=drain)

    asyncio.run(run())
    return version("pydantic-ai-slim")


def smolagents_code(url: str, key: str, streams: bool) -> str:
    import smolagents

    model = smolagents.OpenAIServerModel(model_id="m", api_base=url, api_key=key)
    agent = smolagents.CodeAgent(
        tools=[], model=model, max_steps=NUM_TURNS + 1, verbosity_level=0, stream_outputs=streams
    )
    print(agent.run("Count to nine."), file=sys.stderr)
    return version("smolagents")


def smolagents_tools(url: str, key: str, streams: bool) -> str:
    import smolagents

    model = smolagents.OpenAIServerModel(model_id="m", api_base=url, api_key=key)
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(weather)],
        model=model,
        max_steps=NUM_TURNS + 1,
        verbosity_level=0,
        stream_outputs=streams,
    )
    print(agent.run(ASKED), file=sys.stderr)
    return version("smolagents")


def mini_swe_agent(url: str, key: str, _: bool) -> str:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    config = get_config_from_spec("mini_textbased")
    model = LitellmTextbasedModel(
        model_name="openai/m",
        model_kwargs={"api_base": url, "api_key": key},
        cost_tracking="ignore_errors",
        **{k: v for k, v in config.get("model", {}).items() if k.endswith("_template")},
    )
    settings = {k: v for k, v in config["agent"].items() if k.endswith("_template")}
    agent = DefaultAgent(model, LocalEnvironment(), **settings, step_limit=NUM_TURNS + 1)
    print(agent.run("Count to nine."), file=sys.stderr)
    return version("mini-swe-agent")


def dspy_react(url: str, key: str, _: bool) -> str:
    import dspy

    dspy.configure(lm=dspy.LM("openai/m", api_base=url, api_key=key, cache=False, num_retries=0))
    agent = dspy.ReAct("question -> answer", tools=[weather], max_iters=NUM_TURNS)
    print(agent(question=ASKED).answer, file=sys.stderr)
    return version("dspy")


def codex(url: str, key: str, _: bool) -> str:
    policy = f'{{name="policy",base_url="{url}",env_key="POLICY_KEY",wire_api="responses"}}'
    settings = [f"model_providers.policy={policy}", 'model_provider="policy"']
    settings += ["analytics.enabled=false", "check_for_update_on_startup=false"]
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "m"]
    options += [option for setting in settings for option in ("-c", setting)]
    return run_cli(["codex", "exec", *options, ASKED], {"POLICY_KEY": key})


def claude_code(url: str, key: str, _: bool) -> str:
    settings = {
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    options = ["--model", "m", "--allowedTools", "Bash,Read,Edit,Write,Agent"]
    return run_cli(["claude", "-p", ASKED, *options], settings)


def opencode(url: str, key: str, _: bool) -> str:
    policy = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url, "apiKey": key},
        "models": {"m": {}},
    }
    config = json.dumps({"provider": {"policy": policy}, "autoupdate": False, "share": "disabled"})
    settings = {"OPENCODE_CONFIG_CONTENT": config, "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    # Without a title, another request asks the model for one.
    options = ["-m", "policy/m", "--title", "weather"]
    return run_cli(["opencode", "run", *options, ASKED], settings)


def run_cli(command: list[str], settings: dict[str, str]) -> str:
    """Run a command-line agent in an empty home, where only this machine can be reached; return its version."""
    folder = Path(f"{sys.prefix}-node", "node_modules", ".bin")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        away = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
        env = {"PATH": os.environ["PATH"], "HOME": home, "NO_PROXY": "127.0.0.1", **away}
        program = str(folder / command[0])
        subprocess.run(
            [program, *command[1:]],
            cwd=home,
            env={**env, **settings},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            check=True,
        )
        said = subprocess.check_output([program, "--version"], env=env, text=True, cwd=home)
    return next(word for word in said.split() if word[0].isdigit())


if __name__ == "__main__":
    name, url, key, way = sys.argv[1:]
    print("\n" + globals()[name](url, key, way == "stream"))
