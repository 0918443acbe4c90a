"""Chat with a base model and an adapter side by side: models (`speakers`), conversations and their display (`conversations`)."""
