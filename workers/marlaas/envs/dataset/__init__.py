"""Builtin environment `dataset`: rows of files become tasks, Jinja templates make prompts and truths, and parts make the reward.

`settings` parses the arguments, `files` finds and identifies the source's files, `text_rows` and `arrow_rows` read rows,
`templates` renders them, `index` checks every row once and keeps the result in the user's cache, `tasks` divides the rows into
training and held-out tasks, `rewards` scores replies, and `environment` plays.
"""
