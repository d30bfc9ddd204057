"""What the trainer calls in upstream is there, under those names; and what it claims of upstream's functions holds.

vLLM does not import on a CPU machine, so the calls are read, not run: a function that is renamed or loses a parameter
in a new release is found here and not on the first GPU.
"""
import ast
import types

import plain_fp8
import pytest
import torch
from upstream_source import ROOT, define, stock

from megatron.zero_mismatch import mhc_kernels, quant_fp8
from megatron.zero_mismatch.mhc import Settings

TRAINER = ROOT / "overlays" / "megatron" / "megatron" / "zero_mismatch"
FP8_UTILS = "vllm/model_executor/layers/quantization/utils/fp8_utils.py"
DEEP_GEMM = "vllm/utils/deep_gemm.py"


def upstream_imports():
    """(trainer file, imported module, name) of every import from vllm inside a function; our own overlay left out."""
    for path in sorted(TRAINER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                for alias in node.names:
                    if not f"{node.module}.{alias.name}".startswith("vllm.zero_mismatch"):
                        yield path, node.module, alias.asname or alias.name, alias.name


def read(path: str) -> str | None:
    try:
        return stock(path)
    except KeyError:
        return None


def source_of(module: str) -> str | None:
    path = module.replace(".", "/")
    return read(f"{path}.py") or read(f"{path}/__init__.py")


def names_of(source: str) -> dict[str, ast.AST]:
    """What a module defines or imports at its top level, `if` blocks included."""
    found, bodies = {}, [ast.parse(source).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.If | ast.Try):
                bodies += [node.body, node.orelse]
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found.update((alias.asname or alias.name, node) for alias in node.names)
            elif isinstance(node, ast.Assign):
                found.update((target.id, node) for target in node.targets if isinstance(target, ast.Name))
    return found


def definition(module: str, name: str) -> ast.AST | str | None:
    """The function or class itself, through re-exports; the module's name where the sdist does not hold it."""
    if module.startswith("vllm.third_party."):
        return module  # FlashMLA's interface is fetched when the wheel is built
    node = names_of(source_of(module) or "").get(name)
    if isinstance(node, ast.ImportFrom):
        parts = module.split(".")
        if node.level:
            above = node.level - (read("/".join([*parts, "__init__.py"])) is not None)
            target = ".".join([*parts[: len(parts) - above], *filter(None, [node.module])])
        else:
            target = node.module
        return definition(target, name)
    return node


IMPORTS = sorted({(path.name, module, name, original) for path, module, name, original in upstream_imports()})


def test_the_trainer_does_call_upstream():
    assert len(IMPORTS) > 15


@pytest.mark.parametrize("file,module,name,original", IMPORTS, ids=[f"{f}:{o}" for f, _, _, o in IMPORTS])
def test_imported_name_is_there(file, module, name, original):
    is_module = source_of(f"{module}.{original}") is not None
    assert is_module or original in names_of(source_of(module) or ""), f"{file} imports {original} from {module}"


def counted(call: ast.Call) -> int | None:
    """Positional arguments; None where some are unpacked."""
    return None if any(isinstance(a, ast.Starred) for a in call.args) else len(call.args)


def calls_with_keywords():
    for path in sorted(TRAINER.rglob("*.py")):
        tree = ast.parse(path.read_text())
        imported = {name: (module, original) for p, module, name, original in upstream_imports() if p == path}
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            keywords = [k.arg for k in call.keywords if k.arg]
            if isinstance(call.func, ast.Name) and call.func.id in imported:
                yield path.name, *imported[call.func.id], counted(call), keywords
            elif isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", None) in imported:
                module, original = imported[call.func.value.id]
                if source_of(f"{module}.{original}") is not None:
                    yield path.name, f"{module}.{original}", call.func.attr, counted(call), keywords


@pytest.mark.parametrize("file,module,name,positional,keywords", list(calls_with_keywords()))
def test_call_fits_the_signature(file, module, name, positional, keywords):
    node = definition(module, name)
    assert node is not None, f"{file} calls {name}, which {module} does not define"
    if isinstance(node, ast.FunctionDef) and not (node.args.vararg or node.args.kwarg):
        names = [a.arg for a in node.args.args]
        unknown = set(keywords) - set(names) - {a.arg for a in node.args.kwonlyargs}
        assert not unknown, f"{file}: {name} has no parameter {unknown}"
        if positional is None:
            return
        assert positional <= len(names), f"{file}: {name} takes {len(names)} positional arguments"
        given = set(names[:positional]) | set(keywords)
        required = set(names[: len(names) - len(node.args.defaults)]) | {
            a.arg for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is None}
        assert required <= given, f"{file}: {name} misses {required - given}"


# ---- upstream's plain Python functions, run


def upstream_cast():
    platform = types.SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)
    scope = {"torch": torch, "current_platform": platform, "DEFAULT_BLOCK_SIZE": [128, 128],
             "cdiv": lambda a, b: -(-a // b), "get_fp8_min_max": lambda: (-448.0, 448.0)}
    return define(stock(DEEP_GEMM), ["_ceil_to_ue8m0", "_align", "per_block_cast_to_fp8"], scope)


@pytest.mark.parametrize("spread", [1.0, 2.0**-9])
def test_plain_cast_is_upstreams_cast(spread):
    master = (torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * spread).bfloat16()
    codes, scales = upstream_cast()["per_block_cast_to_fp8"](master, [128, 128], use_ue8m0=True)
    want_codes, want_scales = quant_fp8.quantise_weight(master)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8)) and torch.equal(scales, want_scales)


def test_engines_requantisation_changes_no_value_of_an_exported_weight(monkeypatch):
    cast = upstream_cast()["per_block_cast_to_fp8"]
    module = types.ModuleType("vllm.utils.deep_gemm")
    module.per_block_cast_to_fp8 = cast
    monkeypatch.setitem(__import__("sys").modules, "vllm.utils", types.ModuleType("vllm.utils"))
    monkeypatch.setitem(__import__("sys").modules, "vllm.utils.deep_gemm", module)
    requantise = define(stock(FP8_UTILS), ["requant_weight_ue8m0_inplace"], {
        "torch": torch, "Sequence": list})["requant_weight_ue8m0_inplace"]
    master = (torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) / 64).bfloat16()
    for i, j, block in plain_fp8.blocks_of(master):
        if (i + j) % 2:  # the largest code of these blocks is 224
            block[0, 0] = 225 * 2.0**-12
            block.clamp_(-225 * 2.0**-12, 225 * 2.0**-12)
    codes, scales = quant_fp8.quantise_weight(master)
    before, old_scales = quant_fp8.dequantise_weight(codes, scales), scales.clone()
    requantise(codes, scales, (128, 128))
    assert torch.equal(quant_fp8.dequantise_weight(codes, scales), before) and not torch.equal(scales, old_scales)


def test_plain_mhc_is_upstreams_torch_form():
    """Megatron #4957: the mixing matrix was applied untransposed, which no comparison of two equal mistakes sees.
    upstream's mhc_pre_torch has no norm; ours is checked with a norm of one over a row of unit mean square."""
    upstream = define(stock("vllm/model_executor/kernels/mhc/torch.py"), ["mhc_pre_torch", "mhc_post_torch"],
                      {"torch": torch})
    generator = torch.Generator().manual_seed(0)
    streams, hidden, tokens = 4, 64, 3
    residual = torch.randn(tokens, streams, hidden, generator=generator).bfloat16()
    fn = torch.randn(24, streams * hidden, generator=generator) / 16
    scale, base = torch.randn(3, generator=generator), torch.randn(24, generator=generator)
    settings = Settings(1e-6, 1e-6, 1e-6, 20)
    out, comb, mixed = upstream["mhc_pre_torch"](residual, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 20)
    got_input, got_out, got_comb = mhc_kernels.REFERENCE.pre(
        residual, fn, scale, base, torch.ones(hidden, dtype=torch.bfloat16), settings)
    assert torch.allclose(got_out, out.squeeze(-1), rtol=1e-5) and torch.allclose(got_comb, comb, rtol=1e-4, atol=1e-6)
    rms = mixed.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    assert torch.allclose(got_input.float(), mixed.float() * rms, rtol=1e-2, atol=1e-3)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    got = mhc_kernels.REFERENCE.post(x, residual, got_out, got_comb)
    assert torch.allclose(got.float(), upstream["mhc_post_torch"](x, residual, out, comb).float(), rtol=1e-2, atol=1e-2)
