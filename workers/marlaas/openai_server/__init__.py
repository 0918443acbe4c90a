"""OpenAI-compatible server of an episode: an agent program with a chat-completions client plays and trains unchanged.

It listens on loopback only, in the episode's own process, with its own API key. A request carries the whole list of
messages; it continues the conversation that the list begins with, so generated text is never tokenised again
(`server`). Standard library only.
"""

from marlaas.openai_server.server import OpenAIServer as OpenAIServer
