"""Hook of mkdocs: links from docs/ to other files of the repository, which the site does not contain.

On GitHub such a relative link opens the file. On the site it becomes a link into `repo_url` if mkdocs.yml sets one, and
plain text otherwise. A link to a file that does not exist ends the build.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[\])*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's text with links that lead out of docs/ replaced; mkdocs calls this for every page."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    return _LINK.sub(lambda match: _replaced(match, folder, config.repo_url), markdown)


def _replaced(match: re.Match[str], folder: str, repository: str | None) -> str:
    label, target, anchor = match[1], posixpath.normpath(posixpath.join(folder, match[2])), match[3] or ""
    if target.startswith("docs/"):
        return match[0]
    if target.startswith("..") or not (ROOT / target).exists():
        raise FileNotFoundError(f"a page in {folder} links to {match[2]}, which does not exist")
    return f"[{label}]({repository.rstrip('/')}/blob/HEAD/{target}{anchor})" if repository else label
