import ast
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

def fail(message, code=1):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)

# -----------------------------------------------------------------------------
# Models: every model_*.py beside this file, known by its VARIANTS

def find_models():
    # {command-line name: (path of the model file, its overrides)}; read with ast, so a broken file stops nobody else
    found = {}
    for path in sorted(HERE.glob("model_*.py")):
        try:
            body = ast.parse(path.read_text(encoding="utf-8")).body
            variants = next(ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign) and n.targets[0].id == "VARIANTS")
        except Exception as e:
            print(f"note: {path.name}: no VARIANTS could be read ({type(e).__name__}), left out", file=sys.stderr)
            continue
        for name, overrides in variants.items():
            if name in found:
                fail(f"--model: {name} is in {found[name][0].name} and in {path.name}; rename one of the two")
            found[name] = (path, overrides)
    return found

def load_module(path):
    # the module of one model file, imported once
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[path.stem]

def build(name, **fields):
    # GPT of a command-line name; fields of its GPTConfig given here win over those in VARIANTS
    path, overrides = find_models()[name]
    module = load_module(path)
    own = {k: v for k, v in overrides.items() if k in module.GPTConfig.__dataclass_fields__}
    return module.GPT(module.GPTConfig(**{**own, **fields}))
