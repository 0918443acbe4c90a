"""A line of a conversation for a terminal: who says it, in the colour of the role, and the words.

What a model wrote is shown, never obeyed: control characters that a terminal would act on are written out.
"""

from rich.text import Text

from marlaas_api.visible import visible

_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow", "raw text": "cyan"}


def said(speaker: str, text: str, role: str) -> Text:
    """role: of the message, or `raw text`."""
    return Text.assemble((f"{visible(speaker)}: ", f"bold {_STYLES[role]}"), (visible(text), _STYLES[role]))


def speaker(role: str, name: str | None) -> str:
    """Of a message; name: a tool's."""
    return f"{role} ({name})" if name else role
