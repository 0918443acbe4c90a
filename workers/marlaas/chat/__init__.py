"""Talking to a base model and an adapter side by side: who speaks (`speakers`), the conversation (`sides`: pure), how it looks (`show`)."""
