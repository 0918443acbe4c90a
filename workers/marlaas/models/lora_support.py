"""Find the architectures that vLLM supports with LoRA, by parsing its sources, because importing vLLM takes half a minute.

`python -m marlaas.models.lora_support` rewrites the table in `architectures.py` for the installed vLLM. A test
checks that both agree. No other module imports this one.
"""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_MODELS = "vllm.model_executor.models"
_INTERFACE = "SupportsLoRA"
_TABLES = ("_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")


def read_supported() -> list[str]:
    """Return the architectures (as in `config.json`) of text models that the installed vLLM can serve with LoRA adapters.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    names = set()
    for table in _TABLES:
        for architecture, (module, class_name) in _table(table).items():
            if architecture.endswith(("ForCausalLM", "LMHeadModel")) and _adapts(_absolute(module), class_name):
                names.add(architecture)
    return sorted(names)


def _table(name: str) -> dict[str, tuple[str, str]]:
    for node in _tree(f"{_MODELS}.registry").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            found: dict[str, tuple[str, str]] = ast.literal_eval(node.value)
            return found
    raise LookupError(f"{_MODELS}.registry has no {name}: this vLLM is laid out differently")


def _absolute(module: str) -> str:
    return module if module.startswith("vllm.") else f"{_MODELS}.{module}"


def _adapts(module: str, class_name: str) -> bool:
    """Return whether a class has SupportsLoRA among its direct or indirect bases, across modules."""
    if class_name == _INTERFACE:
        return True
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return any(_adapts(module, base) for base in _bases(node))
        if isinstance(node, ast.ImportFrom) and (there := _imported(module, node, class_name)) is not None:
            return _adapts(*there)
    return False


def _bases(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        if isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name):
            yield base.id


def _imported(module: str, node: ast.ImportFrom, name: str) -> tuple[str, str] | None:
    """Return the module and name that an import of `name` refers to; None if it is not vLLM's."""
    for alias in node.names:
        if (alias.asname or alias.name) == name:
            source = node.module or ""
            if node.level:
                package = module if _path(module).name == "__init__.py" else module.rpartition(".")[0]
                for _ in range(node.level - 1):
                    package = package.rpartition(".")[0]
                source = f"{package}.{source}".rstrip(".")
            return (source, alias.name) if source.startswith("vllm.") else None
    return None


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text(encoding="utf-8"))


@cache
def _path(module: str) -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm is not installed", name="vllm")
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def main() -> None:
    """Rewrite the table in `architectures.py`."""
    file = Path(__file__).with_name("architectures.py")
    text = file.read_text(encoding="utf-8")
    begin, end = text.index("    {\n") + 6, text.rindex("    }\n")
    lines = (f'        "{name}",\n' for name in read_supported())
    file.write_text(text[:begin] + "".join(lines) + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
