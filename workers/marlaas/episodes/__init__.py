"""Episodes as `marlaas run` keeps them for people: what one is (`record`), where they lie (`shelf`), which ones (`selection`), how they look (`show`)."""
