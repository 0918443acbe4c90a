"""OpenAI-compatible server of an episode: an agent program with a chat-completions client plays and trains unchanged.

It listens on loopback only, in the episode's own process, with its own API key. A request carries the whole list of
messages; it continues the conversation that the list begins with, so generated text is never tokenised again
(`conversations`).

It imports the standard library alone, because it runs in an environment's image next to the tenant's packages. A web
framework (aiohttp, or FastAPI with uvicorn) would be one more dependency of every such image, and its version could
conflict with the tenant's. `http.server` parses the requests. Its `ThreadingHTTPServer` is not used, see `loopback`.
"""

from marlaas.openai_server.server import OpenAIServer as OpenAIServer
