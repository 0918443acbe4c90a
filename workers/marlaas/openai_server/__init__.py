"""The OpenAI door: an agent written against a chat-completions client plays, and trains, as it is.

Loopback only, in the episode's own process, with a key of its own. A request carries the whole list of messages; behind it goes on the
conversation whose beginning the list repeats, so what was generated is never tokenised again (`conversations`). Standard library only.
"""

from marlaas.openai_server.server import OpenAIServer as OpenAIServer
