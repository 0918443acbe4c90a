"""One line of a conversation for a terminal: the speaker and the text, in the colour of the role.

Control characters in a model's text are escaped, so that the terminal does not act on them.
"""

from rich.text import Text

from marlaas_api.last_words import visible

_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow", "raw text": "cyan"}


def said(speaker: str, text: str, role: str) -> Text:
    """Return the line. `role` is the message's, or `raw text`."""
    return Text.assemble((f"{visible(speaker)}: ", f"bold {_STYLES[role]}"), (visible(text), _STYLES[role]))


def speaker(role: str, name: str | None) -> str:
    """Return the speaker of a message. `name` is the tool's."""
    return f"{role} ({name})" if name else role
