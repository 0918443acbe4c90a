"""Gateway to Jinja: templates of a row's columns, in a sandbox, in which a missing column or null is an error.

A template that only writes columns (`Question: {{ question }}`) is joined without Jinja: a data set may have a million rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from marlaas.envs.dataset.problems import InvalidArgument, RowProblem
from marlaas.envs.loading import nearest

ROW = "row"
"""Name of the whole row in templates, for columns whose names are no names of variables."""

Row = Mapping[str, Any]


def _is_text(value: object) -> bool:
    return type(value) is str


def _no_null(value: Any) -> Any:
    if value is None:
        raise RowProblem("a column of the template is null")
    return value


_JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_no_null)
_JINJA.globals.clear()


class Template:
    """A template of one field.

    field: names the template in errors. columns: the names that it reads; columns of the row, or ROW.

    Args:
        loc: place of the template below `args`.

    Raises:
        InvalidArgument: Jinja cannot parse it.
    """

    def __init__(self, text: str, field: str, *loc: str | int) -> None:
        self.field = field
        try:
            tree = _JINJA.parse(text)
            self.columns = frozenset(find_undeclared_variables(tree)) - {"range"}
            self._parts = _parts(tree)
            self._render = _joined(self._parts) if self._parts is not None else _rendered(text)
        except TemplateSyntaxError as error:
            raise InvalidArgument(
                f"{field} is not a Jinja template: {error.message} (line {error.lineno})", *loc
            ) from None

    def render(self, row: Row) -> str:
        """Return the text for a row. Raises RowProblem: a column is missing or null, or the template fails."""
        try:
            return self._render(row)
        except RowProblem as error:
            raise RowProblem(f"{self.field}: {error}") from None
        except (KeyError, UndefinedError) as error:
            raise RowProblem(f"{self.field}: {self._lacking(row) or error}") from None
        except Exception as error:
            raise RowProblem(f"{self.field}: the template fails: {type(error).__name__}: {error}") from None

    def render_all(self, columns: Mapping[str, Sequence[Any]], num: int) -> list[str] | None:
        """Return the texts of many rows at once; None if this template, or a column's values, need `render`."""
        if self._parts is None:
            return None
        pieces: list[Iterable[str]] = []
        for text, is_column in self._parts:
            values = columns.get(text) if is_column else None
            if is_column and (values is None or not all(map(_is_text, values))):
                return None
            pieces.append(values if values is not None else repeat(text, num))
        return list(pieces[0]) if len(pieces) == 1 else list(map("".join, zip(*pieces, strict=True)))

    def _lacking(self, row: Row) -> str | None:
        missing = min(self.columns - row.keys() - {ROW}, default=None)
        if missing is None:
            return None
        return f"the row has no column {missing!r}{nearest(missing, row)}; it has {', '.join(map(str, row)) or 'none'}"


def _parts(tree: nodes.Template) -> list[tuple[str, bool]] | None:
    """Return the texts and columns (True) of a template that has nothing else; None for other templates."""
    parts: list[tuple[str, bool]] = []
    for output in tree.body:
        if not isinstance(output, nodes.Output):
            return None
        for node in output.nodes:
            if isinstance(node, nodes.TemplateData):
                parts.append((node.data, False))
            elif isinstance(node, nodes.Name) and node.name not in (ROW, "range"):
                parts.append((node.name, True))
            else:
                return None
    return parts


def _joined(parts: Sequence[tuple[str, bool]]) -> Callable[[Row], str]:
    def join(row: Row) -> str:
        return "".join([str(_no_null(row[text])) if is_column else text for text, is_column in parts])

    return join


def _rendered(text: str) -> Callable[[Row], str]:
    template = _JINJA.from_string(text)
    render, context = template.root_render_func, template.new_context

    def run(row: Row) -> str:
        return "".join(render(context({"range": safe_range, ROW: row, **row}, shared=True)))

    return run
