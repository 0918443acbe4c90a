"""Run the measurements: all of them (hours), the named ones, or one with options of its own."""

import argparse
import ast
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = (
    "bus",
    "job_streams",
    "operator_scale",
    "orchestrator_queue",
    "orchestrator_scale",
    "replicas",
    "groups",
    "sandbox",
    "sandbox_jobs",
    "trainer",
    "memory",
    "compiled",
    "rollout_service",
    "lora",
    "slots",
    "proof",
    "isolation",
    "busy",
    "learning",
    "algorithms",
    "credit",
    "flat_groups",
    "updates",
    "sft",
    "distill",
    "agents",
    "multitenant",
    "fairness",
    "staleness",
    "quality",
    "neighbours",
    "data_sets",
    "soak",
    "store_faults",
    "before",
    "arithmetic",
    "trl_step",
    "trl",
)


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    num_names = next((at for at, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    names, options = arguments[:num_names], arguments[num_names:]
    parser = _parser()
    if options and not names:
        parser.parse_args(options)
    for name in names:
        if name not in NAMES:
            parser.error(f"measurement {name!r} does not exist; choose from {', '.join(NAMES)}")
    if options and options[0] in ("-h", "--help") and not _takes_options(names[0]):
        print(ast.get_docstring(_tree(names[0])), end="\n\n(no options)\n")
        return
    if options and (len(names) > 1 or not _takes_options(names[0])):
        parser.error(
            f"{' '.join(names)}: unexpected option {options[0]}; options need a single measurement that has options"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that a run underway is ended too
    for name in names or NAMES:
        module = importlib.import_module(f"bench.{name}")
        if options:
            module.main(options)
            continue
        print(f"\n## {name}\n\n{(module.__doc__ or '').strip()}\n", flush=True)
        module.main()


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:20}{_about(name)}" for name in NAMES]
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        usage="%(prog)s [-h] [NAME ...] | NAME --OPTION ...",
        description=__doc__,
        epilog="\n".join(["measurements (`NAME --help` shows the options of those marked *):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="measurements to run, in order. [default: all]")
    return parser


def _tree(name: str) -> ast.Module:
    """Parse a measurement without importing it, because half of them load torch."""
    return ast.parse((Path(__file__).parent / f"{name}.py").read_text())


def _about(name: str) -> str:
    summary = (ast.get_docstring(_tree(name)) or "").partition("\n")[0]
    return f"{summary} *" if _takes_options(name) else summary


def _takes_options(name: str) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == "main" and one.args.args for one in _tree(name).body)


if __name__ == "__main__":
    main()
