"""The tree keeps the house's rules: sizes, import directions, all parts of every operator.

What ruff can check (docstrings, print, parameter counts) is in pyproject.toml.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops import _library, kernels
from moe_ops.kernels.kernel import has_triton
from tests.skip_guard import ALLOWED_REASONS

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 400
MAX_CUDA_FILE_LINES = 800
MAX_FUNCTION_LINES = 60

PACKAGES = ("moe_ops", "fx_passes")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CUDA = sorted(path for path in (ROOT / "csrc").iterdir() if path.suffix in (".cu", ".cuh", ".h"))
TESTS = sorted(path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

# Part of moe_ops -> the other parts it may import. `root` is moe_ops/__init__.py, that is, the
# operators' public functions.
_PLAIN = {"_library", "checks", "layout", "comm", "kernels"}
_BUILT_ON_OPS = {"root", "ops", "nn", "parallel", *_PLAIN}
MAY_IMPORT = {
    "_inductor": set(),
    "_library": {
        "_inductor",
        "comm",
        "kernels",
    },  # these two within `define`
    "checks": {"_library"},
    "layout": {"_library", "checks"},
    "comm": {"_library", "checks", "layout", "kernels"},
    "kernels": {"root", "ops", *_PLAIN},
    "ops": _PLAIN,
    "root": {"ops", *_PLAIN},
    "testing": {"root", "ops", *_PLAIN},
    "nn": _BUILT_ON_OPS,
    "parallel": _BUILT_ON_OPS,
    "weights": _BUILT_ON_OPS,
    "export": _BUILT_ON_OPS,
    "integrations": _BUILT_ON_OPS,
    "extensions": set(),
    "demo": {"export", "integrations", "extensions", *_BUILT_ON_OPS},
    "cli": {"demo", "extensions", *_BUILT_ON_OPS},
    "__main__": {"cli"},
    "fx_passes": {"root", "ops", "demo", *_PLAIN},  # the demo's model: for commands
}
LAZY_ONLY = {
    ("_library", "comm"),
    ("_library", "kernels"),
    ("comm", "kernels"),
    ("cli", "demo"),
    ("fx_passes", "demo"),
}
OPTIONAL_PACKAGES = {"demo": {"matplotlib", "tqdm"}, "kernels": {"triton"}}

# The public `dispatch` makes the plan, then calls the operator.
OP_FILES_MAY_IMPORT = {("dispatch", "moe_ops.ops.exchange_plan")}

OPS = sorted(_library.OPS)
ALL_OPS = sorted(_library.OPS | _library.PRIVATE_OPS)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=name_of(path))


def part_of(module: str) -> str:
    """moe_ops.nn.moe -> nn, moe_ops and its functions -> root, torch.fx -> torch."""
    package, *rest = module.split(".")
    if package != "moe_ops":
        return package
    folder = ROOT / "moe_ops"
    is_module = rest and ((folder / rest[0]).is_dir() or (folder / f"{rest[0]}.py").exists())
    return rest[0] if is_module else "root"


def modules_of(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    """What an import statement names, relative ones resolved."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = [node.module] if node.module else []
    if node.level:
        base = [*path.relative_to(ROOT).parent.parts[: 1 - node.level or None], *base]
    return [".".join([*base, alias.name]) for alias in node.names]


def imports_of(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(module, whether it is imported when the file is, line)."""

    def visit(node: ast.AST, eager: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from ((m, eager, child.lineno) for m in modules_of(child, path))
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from visit(child, eager and not typing_only and not is_function)

    return visit(parse(path), True)


def own_part(path: Path) -> str:
    return part_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def test_sizes() -> None:
    too_long = []
    for path in SOURCES + TESTS + CUDA:
        most = MAX_CUDA_FILE_LINES if path in CUDA else MAX_FILE_LINES
        if (lines := len(path.read_text().splitlines())) > most:
            too_long.append(f"{name_of(path)}: {lines} lines, at most {most}")
    for path in SOURCES + TESTS:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long.append(
                        f"{name_of(path)}:{node.lineno}: {node.name} has {lines} lines, "
                        f"at most {MAX_FUNCTION_LINES}"
                    )
    assert not too_long, "\n".join(too_long)


def test_import_directions() -> None:
    wrong = []
    for path in SOURCES:
        part = own_part(path)
        for module, eager, line in imports_of(path):
            other = part_of(module)
            ours = module.split(".")[0] in PACKAGES
            if not ours or other == part:
                continue
            if other not in MAY_IMPORT[part] or (eager and (part, other) in LAZY_ONLY):
                when = "when it is imported" if eager else "at all"
                wrong.append(f"{name_of(path)}:{line}: {part} must not import {other} {when}")
    assert not wrong, "\n".join(wrong)


def test_op_files_import_one_another_in_a_backward_only() -> None:
    wrong = []
    for path in (ROOT / "moe_ops" / "ops").glob("[!_]*.py"):
        backward_lines = {
            line
            for node in ast.walk(parse(path))
            if isinstance(node, ast.FunctionDef) and "backward" in node.name
            for line in range(node.lineno, node.end_lineno + 1)
        }
        wrong += [
            f"{name_of(path)}:{line}: imports {module} outside a backward"
            for module, _, line in imports_of(path)
            if module.startswith("moe_ops.ops.")
            and line not in backward_lines
            and (path.stem, module.rpartition(".")[0]) not in OP_FILES_MAY_IMPORT
        ]
    assert not wrong, "\n".join(wrong)


def test_import_needs_torch_alone() -> None:
    wrong = []
    for path in SOURCES:
        part = own_part(path)
        allowed = {"torch", *PACKAGES, *sys.stdlib_module_names, *OPTIONAL_PACKAGES.get(part, ())}
        wrong += [
            f"{name_of(path)}:{line}: imports {module} when it is imported"
            for module, eager, line in imports_of(path)
            if eager and module.split(".")[0] not in allowed
        ]
    assert not wrong, "\n".join(wrong)


def test_skips_have_an_allowed_reason() -> None:
    wrong = []
    for path in TESTS:
        for node in ast.walk(parse(path)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if not re.fullmatch(r".*\b(skip|skipif|skipIf|skipTest|importorskip)", called):
                continue
            reasons = [word.value for word in node.keywords if word.arg == "reason"]
            if called.endswith("skip") and "importorskip" not in called:
                reasons += node.args[:1]
            if reasons and not isinstance(reasons[0], ast.Constant | ast.JoinedStr):
                continue  # computed: skip_guard sees it when the test runs
            text = ast.unparse(reasons[0]).lstrip("f") if reasons else "none"
            if not text[1:].startswith(ALLOWED_REASONS):
                wrong.append(f"{name_of(path)}:{node.lineno}: {called}, got reason {text}")
    assert not wrong, f"a skip's reason starts with one of {ALLOWED_REASONS}\n" + "\n".join(wrong)


def file_of(op: str) -> Path:
    info = _library.OPS.get(op) or _library.PRIVATE_OPS[op]
    return ROOT.joinpath(*info.module.split(".")).with_suffix(".py")


@pytest.mark.parametrize("op", ALL_OPS)
def test_op_is_functional(op: str) -> None:
    schema = getattr(torch.ops.moe_ops, op).default._schema
    assert not schema.is_mutable
    for argument in (*schema.arguments, *schema.returns):
        assert argument.alias_info is None, f"{op}: {argument.name} is mutated or aliased"
        assert "Tensor" not in str(argument.type) or not argument.kwarg_only


@pytest.mark.parametrize("key", ["CPU", "CUDA", "Autograd"])
@pytest.mark.parametrize("op", ALL_OPS)
def test_op_has_kernel(op: str, key: str) -> None:
    """An op without a derivative has a rule that raises, so that no gradient is lost silently."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_ops::{op}", key)


@pytest.mark.parametrize("op", ALL_OPS)
def test_op_has_fake(op: str) -> None:
    entry = torch._library.simple_registry.singleton.find(f"moe_ops::{op}")
    assert entry.fake_impl.kernel is not None


@pytest.mark.parametrize("op", [op for op in OPS if not op.endswith("_backward")])
def test_op_is_public(op: str) -> None:
    assert op in moe_ops.__all__
    assert getattr(moe_ops, op).__doc__


@pytest.mark.parametrize("op", sorted(_library.PRIVATE_OPS))
def test_private_op_is_not_public(op: str) -> None:
    assert op not in moe_ops.__all__


@pytest.mark.parametrize("op", ALL_OPS)
def test_op_lies_where_its_name_says(op: str) -> None:
    path = file_of(op)
    assert path.parent == ROOT / "moe_ops" / "ops"
    mirrors = {
        "combine": "dispatch",
        **dict.fromkeys(("dispatch_wait", "combine_start", "combine_wait"), "dispatch_start"),
        **dict.fromkeys(("cp_shift_start", "cp_shift_wait"), "cp_shift"),
        "cp_unsplit": "cp_split",
        "unpermute": "permute",
        "reduce_scatter_rows": "all_gather_rows",
        "grouped_mm_wgrad_f32": "grouped_mm",
        "swiglu_backward_with_output": "swiglu",
    }
    word = op.removesuffix("_backward").removesuffix("_wgrad")
    assert path.stem == mirrors.get(word, word)


@pytest.mark.parametrize("op", ALL_OPS)
def test_op_file_has_worked_example(op: str) -> None:
    doc = ast.get_docstring(parse(file_of(op))) or ""
    assert "Letters:" in doc
    assert re.search(r"\[-?\d", doc), "a worked example has numbers in it"


@functools.cache
def readme_status() -> dict[str, str]:
    """Operator -> the last column of its row."""
    _, _, rest = (ROOT / "README.md").read_text().partition("\n## Operators\n")
    lines = rest.partition("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    return {op: status for ops, _, status in rows for op in re.findall(r"`(\w+)`", ops)}


@pytest.mark.parametrize("op", OPS)
def test_op_is_in_readme_table(op: str) -> None:
    assert op in readme_status()


@pytest.mark.skipif(not has_triton(), reason="optional package triton is not installed")
@pytest.mark.parametrize("op", OPS)
def test_readme_status_names_the_kernels(op: str) -> None:
    status, names = readme_status()[op], kernels.table()[op]
    for word, prefix in (("CUDA", "csrc/"), ("Triton", "triton"), ("`torch._grouped_mm`",) * 2):
        exists = any(name.startswith(prefix.strip("`")) for name in names)
        assert (word in status) == exists, f"README's row of {op}: {status}, its kernels: {names}"


def test_every_op_file_has_ops_and_tests() -> None:
    files = {path.stem for path in (ROOT / "moe_ops" / "ops").glob("[!_]*.py")}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "ops").glob("*.py")}
    assert files == {file_of(op).stem for op in ALL_OPS}
    assert not files - tests
