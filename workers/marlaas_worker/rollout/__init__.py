"""The role that owns tokens: it renders, tokenises, generates with a proven adapter version, and records every turn itself."""
