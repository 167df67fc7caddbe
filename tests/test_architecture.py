"""The picture of docs/architecture.md, held to: direction of imports, private names, sizes, docstrings."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "zeroj"
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
ALL_PYTHON = [*MODULES, *SCRIPTS, *sorted((ROOT / "tests").rglob("*.py"))]

# Left to right: a part may import itself and what stands left of it.
FLOW = "errors _compat flags config plan collectives gather spill optimizer step checkpoint engine trainer".split()
# Beside the flow: what each of these may import.
BESIDE = {
    "aot": {"errors", "_compat", "flags", "config", "plan", "aot"},
    "monitor": {"errors", "_compat", "config", "plan", "aot", "monitor"},
    "engine": {*FLOW[: FLOW.index("engine") + 1], "monitor"},
    "trainer": {*FLOW, "monitor"},
    "cli": {*FLOW, "aot", "monitor", "cli"},
    "__main__": {"cli"},
    "__init__": {*FLOW, "aot", "monitor"},
}
PRIVATE_JAX = ("jax._src", "jax.core", "jax.extend", "jax.interpreters", "jaxlib")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 350, 60
MAX_COMPAT_LINES = 450
MAX_TEST_LINES = 500  # a table of cases may be long

# A path below somebody's home or a working folder of one machine; "/home/me" and the like are nobody's.
MACHINE_PATH = re.compile(r"(?<![\w.~}])/(?:home|root|Users|work)/(?!(?:me|user|you)\b)\w")


def relative(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(module: str) -> str:
    """The part of zeroj that a dotted module name belongs to: zeroj.plan.rules -> plan."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def module_name(path: pathlib.Path) -> str:
    pieces = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(pieces[:-1] if pieces[-1] == "__init__" else pieces)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(path: pathlib.Path, when_loaded: bool = False) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, with lines; ``from a import b`` gives a.b where that is a module.

    With ``when_loaded``, only those at the top level of the file: not those inside functions or for the type
    checker alone.
    """
    tree = ast.parse(path.read_text())
    for node in tree.body if when_loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parts[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if not base.startswith("zeroj") or is_module(full) else base), node.lineno


def attribute_chains(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Every dotted expression such as ``jax.core.Jaxpr``, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                names.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield ".".join([inner.id, *reversed(names)]), node.lineno


def is_private_jax(name: str) -> bool:
    return any(name == private or name.startswith(private + ".") for private in PRIVATE_JAX)


def allowed_imports(part: str) -> set[str]:
    return BESIDE[part] if part in BESIDE else set(FLOW[: FLOW.index(part) + 1])


def test_every_part_of_the_package_has_a_place_in_the_flow() -> None:
    parts = {part_of(module_name(path)) for path in MODULES}
    unknown = parts - set(FLOW) - set(BESIDE)
    assert not unknown, (
        f"give these a place in FLOW or BESIDE, and in docs/architecture.md: {sorted(unknown)}"
    )


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_file_imports_only_what_stands_left_of_it(path: pathlib.Path) -> None:
    part = part_of(module_name(path))
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for name, line in imports(path)
        if name.split(".")[0] == "zeroj" and part_of(name) not in allowed_imports(part)
    ]
    assert not wrong, f"{part} may import {sorted(allowed_imports(part))} only:\n" + "\n".join(wrong)


def test_no_circle_of_imports_when_modules_load() -> None:
    known = {module_name(path) for path in MODULES}
    loaded = {path: {name for name, _ in imports(path, when_loaded=True)} for path in MODULES}
    graph = {module_name(path): names & known for path, names in loaded.items()}
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module] - {module}):
                visit(target, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])


@pytest.mark.parametrize("path", [*MODULES, *SCRIPTS], ids=relative)
def test_private_jax_names_stand_in_compat_alone(path: pathlib.Path) -> None:
    if path == PACKAGE / "_compat.py":
        return
    wrong = sorted(
        {(line, name) for name, line in [*imports(path), *attribute_chains(path)] if is_private_jax(name)}
    )
    assert not wrong, f"{relative(path)}: move to zeroj/_compat.py: {wrong}"


@pytest.mark.parametrize("path", ALL_PYTHON, ids=relative)
def test_files_are_short_and_say_what_they_are(path: pathlib.Path) -> None:
    source = path.read_text()
    assert not source or ast.get_docstring(ast.parse(source)), f"{relative(path)} has no docstring"
    lines, limit = source.count("\n"), MAX_TEST_LINES if "tests" in path.parts else MAX_FILE_LINES
    if path == PACKAGE / "_compat.py":  # all that is private to JAX has to be there, whatever it is about
        limit = MAX_COMPAT_LINES
    assert lines <= limit, f"{relative(path)} has {lines} lines: one idea a file, {limit} at most"


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring and decorators."""
    first = node.body[0]
    has_docstring = ast.get_docstring(node, clean=False) is not None
    docstring_lines = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines


@pytest.mark.parametrize("path", [*MODULES, *SCRIPTS], ids=relative)
def test_functions_fit_a_screen(path: pathlib.Path) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {f.name: function_lines(f) for f in functions if function_lines(f) > MAX_FUNCTION_LINES}
    assert not long, f"{relative(path)}: longer than {MAX_FUNCTION_LINES} lines: {long}"


def text_files() -> list[pathlib.Path]:
    folders = ["zeroj", "examples", "benchmarks", "tests", "docs", ".ci", ".github"]
    suffixes = {".py", ".md", ".sh", ".json", ".toml", ".txt", ".yml", ".yaml", ""}
    nested = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return sorted(
        path
        for path in [*nested, *ROOT.glob("*")]
        if path.is_file()
        and path.suffix in suffixes
        and path.name != ".git"
        and "__pycache__" not in path.parts
    )


def test_no_path_of_one_machine_is_written_anywhere() -> None:
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_checks_see_what_they_look_for() -> None:
    """A check that finds nothing anywhere would pass too: feed each one a fault."""
    assert is_private_jax("jax.core.Jaxpr") and is_private_jax("jax._src") and not is_private_jax("jax.numpy")
    assert not is_private_jax("jax.corelation")
    assert MACHINE_PATH.search("open('/ho" + "me/ann/data')") and not MACHINE_PATH.search("net/work/load")
    assert "step" not in allowed_imports("plan") and "plan" in allowed_imports("step")
    assert any(name == "zeroj.errors" for name, _ in imports(PACKAGE / "__init__.py"))
    this = pathlib.Path(__file__)
    assert any(name == "ast.walk" for name, _ in attribute_chains(this))
    function = next(n for n in ast.walk(ast.parse(this.read_text())) if isinstance(n, ast.FunctionDef))
    assert function.name == "relative" and function_lines(function) == 2
