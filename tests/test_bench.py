"""
bench.py: what it measures, measured against things whose cost is known. Run: python -m pytest tests/test_bench.py
"""
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import bench

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--n_layer", "2", "--n_embd", "16", "--n_head", "2", "--tokens", "32", "--block_size", "16", "--rounds", "2", "--threads", "1"]

class Hoard(torch.autograd.Function):
    # keeps y for the backward pass, and two copies of it where autograd does not see them

    @staticmethod
    def forward(ctx, x):
        y = x * 3
        ctx.save_for_backward(y)
        ctx.more = [y.clone(), y.clone()]
        return y * 2

    @staticmethod
    def backward(ctx, dy):
        return 6 * dy

def test_saved_bytes():
    # to the byte: a saved output, an input that was there before, tensors that an object holds, nothing for what is freed
    x, w = torch.randn(1000, requires_grad=True), torch.randn(1000, requires_grad=True)
    assert bench.saved_bytes(lambda: (x.exp() * 1.0).sum()) == 4000
    assert bench.saved_bytes(lambda: (x * w).sum()) == 0
    assert bench.saved_bytes(lambda: Hoard.apply(x).sum()) == 3 * 4000
    with torch.no_grad():
        assert bench.saved_bytes(lambda: (x.exp() * 1.0).sum()) == 0

def test_saved_bytes_grow_as_the_plain_mix_does():
    # every mix of the plain AttnRes file keeps something of every source: per sub-layer it grows with the depth, that of Pre-LN does not
    per = {}
    for name in ("preln", "attnres"):
        for L in (2, 16):
            args = bench_args(name, "--n_layer", str(L))
            per[name, L] = bench.saved_bytes(bench.make_arm(name, "plain", args)[0]) / L
    assert per["preln", 16] < 1.05 * per["preln", 2] and per["attnres", 16] > 1.1 * per["attnres", 2]

def bench_args(*argv):
    seen = []
    before, bench.table = bench.table, seen.append
    try:
        bench.main([*argv, *TINY[:2 * ("--n_layer" not in argv)], *TINY[2:], "--arms", "plain"])
    finally:
        bench.table = before
    return seen[0]

def test_every_arm_is_beside_preln(monkeypatch):
    # a machine that becomes slower during the run changes no ratio
    clock, order = [1.0], []
    def seconds(step, device):
        clock[0] *= 1.0001
        order.append(step)
        return clock[0] * dict(p=1, a=3, b=0.5)[step]
    monkeypatch.setattr(bench, "seconds", seconds)
    out = bench.interleave({bench.PRELN: "p", ("a", "plain"): "a", ("b", "fused"): "b"}, SimpleNamespace(rounds=5, device="cpu"))
    assert [len(r) for r, _ in out.values()] == [5, 5, 5] and all(order[i - 1] == order[i + 1] == "p" for i, s in enumerate(order) if s != "p")
    for arm, want in ((bench.PRELN, 1), (("a", "plain"), 3), (("b", "fused"), 0.5)):
        assert all(abs(r / want - 1) < 1e-6 for r in out[arm][0])
        assert not all(abs(t / out[arm][1][0] - 1) < 1e-6 for t in out[arm][1]) # the bare times would not do

class Here:
    # in place of a process of its own, to save its start
    def __init__(self, n):
        pass
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    def apply(self, f, args):
        return f(*args)

def table_rows(text):
    return [[c.strip() for c in x.split("|")[1:-1]] for x in text.splitlines() if x.startswith("|")][2:]

def rows(capsys):
    return table_rows(capsys.readouterr().out)

def test_table_of_the_stack(capsys, monkeypatch):
    monkeypatch.setattr(bench, "multiprocessing", SimpleNamespace(get_context=lambda kind: SimpleNamespace(Pool=Here)))
    assert bench.main(["hc", *TINY, "--arms", "plain"]) is None
    preln, hc = rows(capsys)
    assert [preln[0], hc[0]] == ["preln", "hc"] and float(preln[5]) == 1
    T, d = 16, 16 # HC adds 192 T d a block (DepthBench, Appendix D)
    assert float(hc[5]) == pytest.approx(1 + 192 * T * d / (8 * T * d * d + 6 * T * d * 48 + 2 * T * T * d), abs=1e-3)
    assert float(hc[7].replace(",", "")) > float(preln[7].replace(",", "")) > 0

def test_table_of_training(capsys):
    assert bench.main(["preln", *TINY, "--arms", "plain", "--train", "--optimizer", "muon"]) is None
    (row,) = rows(capsys)
    assert row[:2] == ["preln", "plain"] and all(float(row[i].replace(",", "")) > 0 for i in (3, 4, 7)) and float(row[6].replace(",", "")) >= 0

def test_bytes_against_the_limit(early):
    out, err = early[0].communicate(timeout=300)
    assert early[0].returncode == 0, err
    got = {op: (float(moved.replace(",", "")), float(limit.replace(",", "")), float(ratio)) for op, moved, limit, ratio in table_rows(out)}
    assert len(got) == 12 and all(ratio > 1 and abs(moved / limit - ratio) < 0.01 for moved, limit, ratio in got.values())
    # Phi of mHC does not fit a program: X' is read once more, forward, and X' and dh, backward
    above = {"mhc forward": 1.6, "mhc backward": 1.4}
    assert all(ratio <= above.get(op, 1.25) for op, (_, _, ratio) in got.items()), got

def test_bytes_are_counted_once_per_launch(interpreter, monkeypatch):
    # a kernel of known traffic: a row loaded twice and stored once, weights that all rows share not counted
    def ops(R, device, C, iters):
        x, w = torch.ones(R, C), torch.ones(C)
        yield "twice", 2, lambda: twice[(R,)](x, w, BLOCK=C)
    monkeypatch.setattr(bench, "ops", ops)
    assert bench.count_bytes(64) == {"twice": (2 * 4 * 64, 2 * 2 * 64)}

def test_words_for_mistakes(capsys):
    for argv, words in ((["hcc"], "hcc: is not one of"), (["hc", "--tokens", "100", "--block_size", "64"], "must be a multiple")):
        with pytest.raises(SystemExit) as e:
            bench.main(argv)
        assert e.value.code == 1 and words in capsys.readouterr().err

@triton.jit
def twice(x_ptr, w_ptr, BLOCK: tl.constexpr):
    at, mask = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < BLOCK
    y = tl.load(x_ptr + at, mask=mask, other=0.0) + tl.load(x_ptr + at, mask=mask, other=0.0)
    tl.store(x_ptr + at, y * tl.load(w_ptr + tl.arange(0, BLOCK), mask=mask, other=0.0), mask=mask)

KERNELS = '''
import triton
import triton.language as tl

@triton.jit
def good_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n, other=0).to(tl.float32) + 1, mask=o < n)

@triton.jit
def greedy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(n):
        total = total + tl.load(x_ptr + i * BLOCK + o) * total
    tl.store(y_ptr + o, total)

def ahead_of_time(d):
    for kernel in KERNELS:
        yield kernel.__name__, kernel, dict(x_ptr="*fp32", y_ptr="*fp32", n="i32", BLOCK="constexpr"), dict(BLOCK=d), 8 if kernel is good_kernel else 1
'''

REPORTS = {"good_kernel,": 0, "good_kernel, greedy_kernel": 1} # kernels: exit status

def start_early(tmp):
    commands = [["bench.py", "--traffic", "--device", "cpu"]]
    for i, kernels in enumerate(REPORTS):
        (tmp / str(i)).mkdir()
        (tmp / str(i) / "kernels.py").write_text(KERNELS.replace("in KERNELS", f"in ({kernels})"))
        commands.append(["-c", f"import sys; sys.path[:0] = [{str(tmp / str(i))!r}, {str(ROOT)!r}]; import bench; sys.exit(bench.main(['preln', 'hc', '--report', '--widths', '8192']))"])
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return tuple(subprocess.Popen([sys.executable, *c], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands)

@pytest.mark.parametrize("i", range(len(REPORTS)))
@pytest.mark.skipif(sys.platform != "linux", reason="triton")
def test_report(early, i):
    # registers and spills as the bundled tool reads them from the binary: 8,192 floats of state do not fit 32 threads
    (kernels, status), (out, err) = [*REPORTS.items()][i], early[1 + i].communicate(timeout=300)
    assert early[1 + i].returncode == status, err
    spills = {(r[0], r[2]): int(r[5]) for r in table_rows(out)}
    assert set(spills) == {(k.strip(), sm) for k in kernels.split(",") if k.strip() for sm in ("80", "90")}
    assert all((s > 0) == (k == "greedy_kernel") for (k, _), s in spills.items())
