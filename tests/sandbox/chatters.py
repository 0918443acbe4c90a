"""Agents behind the OpenAI door, in a child. Imported by sandbox children only; the standard library is client enough."""

import json
import urllib.error
import urllib.request

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def _post(server, **fields):
    headers = {"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", **fields}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{server.base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)


def uses_a_tool(task, agent):
    asked = [{"role": "user", "content": "1 + 2?"}]
    with agent.openai() as server:
        first = _post(server, messages=asked, tools=[TOOL], temperature=0.5)
        message = first["choices"][0]["message"]
        answer = {"role": "tool", "content": "3", "tool_call_id": message["tool_calls"][0]["id"]}
        second = _post(server, messages=[*asked, message, answer], tools=[TOOL])
        return {"policy": float(second["choices"][0]["message"]["content"]) + first["usage"]["prompt_tokens"]}
