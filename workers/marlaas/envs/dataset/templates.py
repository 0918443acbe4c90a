"""Gateway to Jinja: templates of a row's columns, in a sandbox, in which a missing column or null is an error.

Templates of columns and of methods of text (`Question: {{ question }}`, `{{ answer.split('####')[1] }}`) are rendered for many rows
at once without Jinja, which takes ten times as long: a data set may have a million rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter, methodcaller
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from marlaas.envs.dataset.problems import InvalidArgument, RowProblem
from marlaas.envs.loading import nearest

ROW = "row"
"""Name of the whole row in templates, for columns whose names are no names of variables."""

Row = Mapping[str, Any]


Compute = Callable[[Any], Any]
_METHODS = frozenset(
    [
        "split",
        "rsplit",
        "splitlines",
        "partition",
        "rpartition",
        "strip",
        "lstrip",
        "rstrip",
        "replace",
        "lower",
        "upper",
        "removeprefix",
        "removesuffix",
        "title",
        "capitalize",
    ]
)


def _are_texts(values: Iterable[object]) -> bool:
    return set(map(type, values)) <= {str}


def _texts(piece: "_Piece", columns: Mapping[str, Sequence[Any]]) -> Sequence[str] | None:
    """Return a piece's texts; None if a value is no text."""
    values = columns.get(piece.column)
    if values is None or not _are_texts(values):
        return None
    made: Iterable[Any] = values
    for compute in piece.computes:
        made = map(compute, made)
    try:
        texts = list(made)
    except Exception:  # Jinja says what is wrong, row by row
        return None
    return texts if _are_texts(texts) else None


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
            self._pieces = _pieces(tree)
            self._render = _rendered(text)
        except TemplateSyntaxError as error:
            raise InvalidArgument(f"not a Jinja template: {error.message} (line {error.lineno})", *loc) from None

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
        """Return the texts of many rows at once, without Jinja; None if this template, or a column's values, need `render`."""
        if self._pieces is None:
            return None
        found: list[Iterable[str]] = []
        for piece in self._pieces:
            texts = _texts(piece, columns) if piece.column else repeat(piece.text, num)
            if texts is None:
                return None
            found.append(texts)
        if not found:
            return [""] * num
        return list(found[0]) if len(found) == 1 else list(map("".join, zip(*found, strict=True)))

    def _lacking(self, row: Row) -> str | None:
        missing = min(self.columns - row.keys() - {ROW}, default=None)
        if missing is None:
            return None
        return f"the row has no column {missing!r}{nearest(missing, row)}; it has {', '.join(map(str, row)) or 'none'}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a template's text: a constant, or what functions make of a column's text, one after the other."""

    text: str = ""
    column: str = ""
    computes: tuple[Compute, ...] = ()


def _pieces(tree: nodes.Template) -> list[_Piece] | None:
    """Return the pieces of a template that has constants, columns and known methods of text only; None for other templates."""
    pieces: list[_Piece] = []
    for output in tree.body:
        if not isinstance(output, nodes.Output):
            return None
        for node in output.nodes:
            found = _Piece(node.data) if isinstance(node, nodes.TemplateData) else _column(node)
            if found is None:
                return None
            pieces.append(found)
    return pieces


def _column(node: nodes.Node) -> _Piece | None:
    """Return an expression as functions of one column (`answer.split('####')[1]`); None for other expressions."""
    match node:
        case nodes.Name(name=name):
            return None if name in (ROW, "range") else _Piece(column=name)
        case nodes.Filter(node=inner, name="trim", args=[], kwargs=[], dyn_args=None, dyn_kwargs=None) if (
            inner is not None
        ):
            return _then(inner, str.strip)
        case nodes.Getitem(node=inner, arg=nodes.Const(value=int(at))):
            return _then(inner, itemgetter(at))
        case nodes.Call(
            node=nodes.Getattr(node=inner, attr=method), args=args, kwargs=[], dyn_args=None, dyn_kwargs=None
        ):
            given = [one.value for one in args if isinstance(one, nodes.Const)]
            if method in _METHODS and len(given) == len(args):
                return _then(inner, methodcaller(method, *given))
    return None


def _then(inner: nodes.Node, function: Compute) -> _Piece | None:
    """Return an inner expression, followed by a function."""
    before = _column(inner)
    return None if before is None else _Piece(column=before.column, computes=(*before.computes, function))


def _rendered(text: str) -> Callable[[Row], str]:
    template = _JINJA.from_string(text)
    render, context = template.root_render_func, template.new_context

    def run(row: Row) -> str:
        return "".join(render(context({"range": safe_range, ROW: row, **row}, shared=True)))

    return run
