"""Chat with a base model and an adapter side by side: models (`speakers`), conversations (`sides`: pure), display (`show`)."""
