"""Parses a reply's tokens by its model family: text, reasoning, content and tool calls (docs/reference/models.md)."""

from marlaas_worker.rollout.renderers.renderer import Renderer, TemplateRefused

__all__ = ["Renderer", "TemplateRefused"]
