"""
The model files are copies of model_preln.py on purpose. What they share has to stay the same text, and what they change has to stay small.

    python tests/test_sync.py          per file: definitions changed, lines added and removed against model_preln.py
    python tests/test_sync.py --fix    copy the shared definitions of model_preln.py over those that differ
    python -m pytest -q tests/test_sync.py
"""
import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = "model_preln.py"

# what each idea touches: lines added against model_preln.py at most, lines of the file at most, and the definitions that it may change.
# Everywhere free: docstring, VARIANTS, own config fields after the shared ones, and what model_preln.py does not have.
ALLOWED = {
    "model_norms.py": (110, 285, {"Block", "GPT.__init__", "GPT.init_depth"}),
    "model_hc.py": (60, 255, {"Block", "GPT.NO_DECAY", "GPT.__init__", "GPT.begin", "GPT.readout", "GPT.hidden", "GPT.depth_flops", "GPT.init_depth"}),
    "model_mhc.py": (85, 275, {"Block", "GPT.NO_DECAY", "GPT.__init__", "GPT.begin", "GPT.readout", "GPT.hidden", "GPT.depth_flops", "GPT.init_depth"}),
    "model_attnres.py": (55, 255, {"Block", "GPT.__init__", "GPT.begin", "GPT.readout", "GPT.hidden", "GPT.depth_flops"}),
    "model_moda.py": (70, 265, {"CausalSelfAttention", "Block", "GPT.MATRIX", "GPT.__init__", "GPT.begin", "GPT.readout", "GPT.hidden", "GPT.depth_flops", "GPT.init_depth"}),
    "model_layerrope.py": (60, 255, {"Block", "GPT.NO_DECAY", "GPT.__init__"}),
    "model_mgr.py": (60, 255, {"Block", "GPT.NO_DECAY", "GPT.__init__", "GPT.begin", "GPT.readout", "GPT.hidden", "GPT.depth_flops"}),
}
BETWEEN = {("model_hc.py", "model_mhc.py"): 30} # lines that the second may add to the first
FREE = {"docstring", "VARIANTS", "GPTConfig.fields"}

@functools.cache
def definitions(text):
    # {name: (first line, line after the last)} from 0; classes with methods that differ from file to file are taken apart
    spans, lines = {}, text.split("\n")
    def put(name, first, last):
        assert name not in spans, f"{name} is defined twice"
        spans[name] = (first, last)
    for node in ast.parse(text).body:
        start = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])]) - 1
        if isinstance(node, ast.ClassDef) and node.name in ("GPT", "GPTConfig"):
            first = start
            for item in node.body:
                if node.name == "GPTConfig" and isinstance(item, ast.AnnAssign): # all the fields together, with the class line
                    spans["GPTConfig.fields"] = (start, item.end_lineno)
                    continue
                name = item.name if isinstance(item, ast.FunctionDef) else item.targets[0].id if isinstance(item, ast.Assign) else "doc"
                put(f"{node.name}.{name}", item.lineno - 1, item.end_lineno)
            if node.name == "GPT":
                put("class GPT", first, first + 1)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            put(node.name, start, node.end_lineno)
        elif isinstance(node, ast.Assign):
            put(node.targets[0].id, start, node.end_lineno)
        elif isinstance(node, ast.Expr):
            put("docstring", start, node.end_lineno)
        else: # imports, one by one
            put(lines[start], start, node.end_lineno)
    for i, line in enumerate(lines): # headings: they are the order of the sections
        if line.strip().startswith("# ---") and i + 1 < len(lines):
            put(lines[i + 1].strip(), i, i + 2)
    return spans

@functools.cache
def texts(text):
    lines = text.split("\n")
    return {name: "\n".join(lines[a:b]) for name, (a, b) in definitions(text).items()}

def added(old, new):
    # (lines added, lines removed), from the longest common subsequence: what a minimal diff prints
    while old and new and old[-1] == new[-1]: # the end that is the same
        old, new = old[:-1], new[:-1]
    row = [0] * (len(new) + 1)
    for a in old:
        last = row[:]
        for j, b in enumerate(new):
            row[j + 1] = last[j] + 1 if a == b else max(last[j + 1], row[j])
    return len(new) - row[-1], len(old) - row[-1]

def changed(base, text):
    # definitions of the baseline that differ in text, own config fields aside
    base, text = texts(base), texts(text)
    fields = base["GPTConfig.fields"]
    return [n for n in base if base[n] != text.get(n) and n not in FREE] + ([] if text.get("GPTConfig.fields", "").startswith(fields) else ["GPTConfig.fields"])

@functools.cache
def problems(name, base, text):
    # what is wrong with one model file, as sentences; a file that is not in the table is its owner's business
    spans, base_spans = definitions(text), definitions(base) # also: it parses
    if name not in ALLOWED:
        return []
    budget, cap, may = ALLOWED[name]
    found = [f"{n} differs from {BASE}" for n in changed(base, text) if n not in may]
    for n, (a, b) in spans.items():
        architecture = spans["# The architecture (this is the part that differs)"][0] < a < spans["class GPT"][0] or n.startswith("GPT.")
        flag = n in ("GROWS", "import math", "import itertools")
        if n not in base_spans and not architecture and not flag:
            found.append(f"{n} is new and stands outside the architecture section")
    places = [spans[n][0] for n in sorted(base_spans, key=base_spans.get) if n in spans]
    if places != sorted(places):
        found.append("shared definitions stand in another order")
    for line in texts(text)["GPTConfig.fields"].split("\n"):
        if line.startswith("    ") and "#" not in line:
            found.append(f"config field without a comment: {line.strip()}")
    lines = text.count("\n")
    if (n := added(base.split("\n"), text.split("\n"))[0]) > budget:
        found.append(f"{n} lines added to {BASE}, {budget} allowed")
    if lines > cap:
        found.append(f"{lines} lines, {cap} allowed")
    doc = ast.get_docstring(ast.parse(text), clean=False) or ""
    if doc.count("\n") > 12:
        found.append(f"docstring of {doc.count(chr(10))} lines")
    if name != BASE and f"diff model_preln.py {name}" not in doc or "arXiv" not in doc:
        found.append("docstring without the diff to read or the paper")
    return found

def fix(name, base, text):
    # the shared definitions copied over; what a file may change, and what is missing in it, is left alone
    for n in changed(base, text):
        if n in texts(text) and n not in ALLOWED[name][2] | {"GPTConfig.fields"}:
            lines, (a, b) = text.split("\n"), definitions(text)[n]
            lines[a:b] = texts(base)[n].split("\n")
            text = "\n".join(lines)
    if "GPTConfig.fields" in changed(base, text): # shared fields, then what is not among them
        want, have = texts(base)["GPTConfig.fields"].split("\n"), texts(text)["GPTConfig.fields"].split("\n")
        known = {line.split(":")[0] for line in want}
        lines, (a, b) = text.split("\n"), definitions(text)["GPTConfig.fields"]
        lines[a:b] = want + [line for line in have if line.split(":")[0] not in known]
        text = "\n".join(lines)
    return text

def read(name):
    return (ROOT / name).read_text(encoding="utf-8")

MODELS = sorted(p.name for p in ROOT.glob("model_*.py") if p.name != BASE)

# -----------------------------------------------------------------------------

@pytest.mark.parametrize("name", MODELS)
def test_model_file(name):
    try:
        found = problems(name, read(BASE), read(name))
    except SyntaxError as e:
        pytest.fail(f"{name} does not parse: {e}")
    assert not found, "\n".join(found)

@pytest.mark.parametrize("pair", [p for p in BETWEEN if set(p) <= set(MODELS)], ids="-".join)
def test_budget_between(pair):
    assert added(*(read(n).split("\n") for n in pair))[0] <= BETWEEN[pair]

CHANGES = { # a change that must be seen, for each kind of shared text
    "attention not causal": ("is_causal=True", "is_causal=False"),
    "init": ("std=0.02, a=-0.06", "std=0.03, a=-0.06"),
    "a default": ("n_head: int = 16", "n_head: int = 12"),
    "a comment": ("# (B, T, V)", "# (B, T, vocab)"),
    "a check": ('raise ValueError(f"n_kv_head: {self.n_kv_head} does not divide n_head {self.n_head}")', "pass"),
    "an import": ("import torch.nn.functional as F", "import torch.nn.functional as F\nimport os"),
    "a heading": ("# Building blocks (same text in every model file)", "# Building blocks"),
    "a shared class attribute": ('"mlp.w13.weight", ', ""),
    "a helper in the wrong place": ("class RMSNorm(nn.Module):", "def helper(x):\n    return x\n\nclass RMSNorm(nn.Module):"),
    "a missing method": ("    def num_params(self):\n        return sum(p.numel() for p in self.parameters())\n\n", ""),
}

@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [n for n in MODELS if n in ALLOWED])
def test_change_is_seen(name, change):
    old, new = CHANGES[change]
    if "is_causal" in old and name == "model_moda.py" or change == "a shared class attribute" and "GPT.MATRIX" in ALLOWED[name][2]:
        pytest.skip("this file may change it")
    text = read(name)
    assert old in text
    assert problems(name, read(BASE), text.replace(old, new)) != problems(name, read(BASE), text)

def test_budget_is_seen():
    base = read(BASE)
    text = base.replace("class Block(nn.Module):", "\n".join(f"x{i} = {i}" for i in range(150)) + "\n\nclass Block(nn.Module):")
    assert any("151 lines added" in p for p in problems("model_norms.py", base, text))

def test_line_count_is_that_of_diff():
    assert added(list("abcdef"), list("abXdeYZf")) == (3, 1)
    assert added(list("abc"), list("abc")) == (0, 0) and added([], list("ab")) == (2, 0)

@pytest.mark.parametrize("name", [n for n in MODELS if n in ALLOWED])
def test_fix_repairs(name):
    base, text = read(BASE), read(name)
    broken = text.replace("std=0.02, a=-0.06, b=0.06)\n        self.init_depth()", "std=0.03)\n        self.init_depth()").replace("n_head: int = 16", "n_head: int = 12")
    broken = broken.replace("F.silu(gate)", "F.gelu(gate)")
    assert broken != text and fix(name, base, broken) == text
    assert fix(name, base, text) == text

def test_file_of_a_user_is_only_parsed():
    assert problems("model_mine.py", read(BASE), "VARIANTS = {'mine': {}}\n") == []
    with pytest.raises(SyntaxError):
        problems("model_mine.py", read(BASE), "class GPT(:\n")

def main():
    base, bad = read(BASE), 0
    for name in MODELS:
        if name in ALLOWED and "--fix" in sys.argv[1:] and (new := fix(name, base, read(name))) != read(name):
            (ROOT / name).write_text(new, encoding="utf-8")
            print(f"fixed {name}")
    print(f"{'file':20} {'lines':>5} {'added':>5} {'removed':>7} {'budget':>6}  definitions changed; new")
    for name in MODELS:
        try:
            text = read(name)
            found, (plus, minus) = problems(name, base, text), added(base.split("\n"), text.split("\n"))
        except SyntaxError as e:
            print(f"{name:20} does not parse: {e}")
            bad += name in ALLOWED
            continue
        new = [n for n in texts(text) if n not in texts(base) and not n.startswith("import ")]
        names = [n for n in changed(base, text) if n in texts(text)]
        print(f"{name:20} {text.count(chr(10)):5} {plus:5} {minus:7} {ALLOWED[name][0] if name in ALLOWED else '-':>6}  {', '.join(names)}; {', '.join(new)}")
        for p in found:
            print(f"    {p}")
        bad += len(found)
    for a, b in BETWEEN:
        if a in MODELS and b in MODELS:
            print(f"{b} against {a}: {added(read(a).split(chr(10)), read(b).split(chr(10)))[0]} lines added, {BETWEEN[a, b]} allowed")
    return 1 if bad else 0

if __name__ == "__main__":
    raise SystemExit(main())
