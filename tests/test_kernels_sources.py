"""
The fused AttnRes, MoDA and loss against the model files: every gradient, random cotangent.

    python tests/test_kernels_sources.py     compiles the Triton kernels for sm_80 and sm_90, without a device
"""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__": # compiled for real, not interpreted
    os.environ["TRITON_INTERPRET"] = "0"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch
import torch.nn.functional as F

import kernels as K
import train

ATTNRES, MODA, PRELN = (train.load_module(train.HERE / f"model_{name}.py") for name in ("attnres", "moda", "preln"))
TINY = dict(vocab_size=61, block_size=64, n_layer=3, n_head=2, n_embd=24)

def build(arch, dtype=torch.float64, **fields):
    torch.manual_seed(0)
    model = arch.GPT(arch.GPTConfig(**{**TINY, **fields})).to(dtype)
    for p in model.parameters(): # what starts at zero or one would hide mistakes; queries of scale 1/sqrt(d)
        p.data.add_(torch.randn_like(p) * (p.numel() ** -0.5 if p.ndim == 1 else 0.1))
    return model

def stack(model, x, dy):
    # the blocks and the readout, and the gradient of everything
    x = x.detach().requires_grad_()
    state = model.begin(x)
    for block in model.h:
        state = block(state)
    y = model.readout(state)
    names, params = zip(*((n, p) for n, p in model.named_parameters() if not n.startswith(("wte", "lm_head", "norm_f"))))
    return dict(zip(("y", "x", *names), (y.detach(), *torch.autograd.grad(y, (x, *params), dy))))

def fused(call, *args):
    undo = [K.fuse(module) for module in (ATTNRES, MODA, PRELN)]
    try:
        return call(*args)
    finally:
        for u in undo:
            u()

def worst(got, want):
    assert set(got) == set(want)
    return max(((got[n].double() - want[n].double()).abs().max() / want[n].double().abs().max()).item() for n in want)

# -----------------------------------------------------------------------------
# Plain torch inside the Functions

def attnres(L, b=1, **more):
    return ATTNRES, dict(n_layer=L, source_block=b, **more)

def moda(L, H=2, Hkv=0, C=24, **more):
    return MODA, dict(n_layer=L, n_head=H, n_kv_head=Hkv, n_embd=C, **more)

@pytest.mark.parametrize("case, rows", [
    (attnres(1), 7), (attnres(2), 7), (attnres(4), 64), (attnres(13), 7), (attnres(32, n_embd=8), 1), # 3 to 65 sources
    (attnres(8, 0), 7), (attnres(21, 0, n_embd=8), 3), (attnres(5, 100), 7),
    (moda(1), 7), (moda(2, 2, 1, rope_on_depth_k=True), 7), (moda(5, 4, 2, 40, norm="post"), 7), (moda(4, 6, 2, 12), 33)])
def test_every_gradient_in_float64(case, rows):
    model = build(case[0], **case[1])
    x, dy = torch.randn(2, 2, rows, model.config.n_embd, dtype=torch.float64)
    want, got, again = stack(model, x, dy), fused(stack, model, x, dy), fused(stack, model, x, dy)
    assert worst(got, want) < 1e-10
    assert all(torch.equal(got[n], again[n]) for n in got) # the same bits
    assert worst(stack(model, x, dy), want) == 0 # undone

@pytest.mark.parametrize("b", [1, 2])
def test_a_block_on_an_older_state(b): # block 2 after block 0: its queries follow those of block 1, its sources do not
    model = build(ATTNRES, n_layer=6, source_block=b)
    x, dy = torch.randn(2, 2, 7, 24, dtype=torch.float64)
    def run():
        z = x.clone().requires_grad_()
        state = model.h[0](model.begin(z))
        model.h[1](state)
        y = model.readout(model.h[4](model.h[3](model.h[2](state))))
        params = {n: p for n, p in model.named_parameters() if n.startswith(("h.0", "h.2", "h.3", "h.4", "res_f"))}
        return dict(zip(("y", "x", *params), (y.detach(), *torch.autograd.grad(y, (z, *params.values()), dy))))
    assert worst(fused(run), run()) < 1e-10

def test_means_far_from_zero():
    model = build(ATTNRES)
    x, dy = torch.randn(2, 2, 7, 24, dtype=torch.float64)
    assert worst(fused(stack, model, x + 100, dy), stack(model, x + 100, dy)) < 1e-10

def broken_ledger(monkeypatch, name, change):
    right = getattr(K.Group, name)
    monkeypatch.setattr(K.Group, name, lambda self, *args: change(self, right, *args))

@pytest.mark.parametrize("name, change", [
    ("pull", lambda g, right, a, b, V, r, dV, c: right(g, a, b - 1, V, r, dV, c)), # the newest reader forgotten
    ("pull", lambda g, right, a, b, V, r, dV, c: right(g, a, b, V, r, dV, torch.zeros_like(c))), # no gradient through the rms of the key
    ("pull", lambda g, right, a, b, V, r, dV, c: V.size(1) > 1 or right(g, a, b, V, r, dV, c)), # tiles forgotten
    ("weigh", lambda g, right, V, r, a, b: (right(g, V, r, a, b)[0] * (b - a > 1 or g.lse.isinf().any()), right(g, V, r, a, b)[1])), # the newest source forgotten
    ("prefix", lambda g, right, led: [[x for x in tile if x is not None] for tile in led.tiles[:g.tiles]])]) # a tile has grown since
def test_broken_twins_are_caught(monkeypatch, name, change):
    model = build(ATTNRES, n_layer=9)
    x, dy = torch.randn(2, 1, 7, 24, dtype=torch.float64)
    want = stack(model, x, dy)
    broken_ledger(monkeypatch, name, change)
    assert worst(fused(stack, model, x, dy), want) > 1e-4

def test_moda_unmerged_backward_is_caught(monkeypatch):
    model = build(MODA)
    x, dy = torch.randn(2, 1, 7, 24, dtype=torch.float64)
    want, right = stack(model, x, dy), K.flash
    def unmerged(q, k, v, scale, back=None): # the library's own lse in place of the merged one
        return right(q, k, v, scale) if back is None else right(q, k, v, scale, (back[0], *right(q, k, v, scale)))
    monkeypatch.setattr(K, "flash", unmerged)
    assert worst(fused(stack, model, x, dy), want) > 1e-4

def test_flash_fails_by_name(monkeypatch):
    monkeypatch.setattr(torch.ops, "aten", object())
    with pytest.raises(RuntimeError, match="_scaled_dot_product_flash_attention_for_cpu_backward"):
        K.flash(torch.ones(1, 1, 1, 2), None, None, 1.0, ())

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss(dtype, monkeypatch):
    torch.manual_seed(0)
    x, w, t = torch.randn(3, 50, 32, dtype=dtype, requires_grad=True), torch.randn(700, 32, requires_grad=True), torch.randint(700, (3, 50))
    t[0, :9] = -1
    w = (w.double() if dtype == torch.float64 else w).detach().requires_grad_()
    def run(loss):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = loss(x, w, t)
        return dict(zip("yxw", (y.detach(), *torch.autograd.grad(3 * y, (x, w)))))
    one = run(K.lm_loss)
    monkeypatch.setattr(torch.Tensor, "split", lambda s, n, right=torch.Tensor.split: right(s, min(n, 16))) # ten pieces
    want, got = run(PRELN.lm_loss), run(K.lm_loss)
    assert got["y"].dtype == want["y"].dtype and got["x"].dtype == dtype and got["w"].dtype == w.dtype
    for y in (one, got):
        assert worst(y, want) < {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    with torch.no_grad():
        assert torch.equal(K.lm_loss(x, w, t), got["y"]) or dtype == torch.bfloat16

def test_whole_model_and_bf16_autocast():
    for arch in (ATTNRES, MODA):
        model = build(arch, torch.float32)
        idx, target = torch.randint(61, (2, 2, 33))
        def run():
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(idx, target)[1]
            loss.backward()
            return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}
        plain, got, ref = run(), fused(run), {"loss": 0}
        model.zero_grad()
        ref["loss"] = model(idx, target)[1]
        ref["loss"].backward()
        ref = {"loss": ref["loss"].detach(), **{n: p.grad for n, p in model.named_parameters()}}
        assert worst(got, ref) < 2 * worst(plain, ref)
        with torch.no_grad():
            a, b = model(idx, target)[1], fused(lambda: model(idx, target)[1])
            assert abs(a - b) < 1e-5

# -----------------------------------------------------------------------------
# The limits of the pull backward

def test_second_backward_raises():
    model = build(ATTNRES)
    def run():
        y = model.readout(model.h[0](model.begin(torch.randn(1, 5, 24, dtype=torch.float64, requires_grad=True))))
        y.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="one backward per forward"):
            y.sum().backward()
    fused(run)

def test_no_gradient_at_intermediate_states():
    model = build(ATTNRES, n_layer=4, source_block=2)
    def run():
        state = model.h[0](model.begin(torch.randn(1, 5, 24, dtype=torch.float64, requires_grad=True)))
        y = model.readout(model.h[2](model.h[1](state)))
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(y.sum(), state[2])
    fused(run)

def saved_bytes(L, plain=False, T=32, C=32):
    # what autograd and the ledger hold after the forward of the mixing alone: no branches
    model = build(ATTNRES, torch.float32, n_layer=L, n_embd=C)
    storages = {}
    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}
    def run():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            state = ATTNRES.GPT.begin(model, torch.randn(1, T, C, requires_grad=True))
            for block in model.h:
                for res, norm in ((block.res_attn, block.norm_attn), (block.res_mlp, block.norm_mlp)):
                    state = ATTNRES.push(state, ATTNRES.mix(state, res, norm).sin(), True)
            y = ATTNRES.mix(state, model.res_f)
        if not plain:
            led = state[0]
            for t in (*led.V, *led.r, *(r[0].lse for rs in led.readers for r in rs)):
                pack(t)
        return sum(n for p, n in storages.items() if p not in params) / (T * (2 * L + 1))
    return run() if plain else fused(run)

def test_memory_is_constant_per_sublayer():
    sizes = [saved_bytes(L) for L in (8, 32, 128)]
    print("saved bytes per token and sub-layer, L 8, 32, 128:", [round(s) for s in sizes], "plain:", [round(saved_bytes(L, True)) for L in (8, 32)])
    assert max(sizes) < 1.15 * min(sizes)
    assert saved_bytes(32, True) > 1.15 * saved_bytes(8, True) # the plain file keeps p of every source

# -----------------------------------------------------------------------------
# The swap

def copy_of(tmp_path, change=("", "")):
    path = tmp_path / "model_mine.py"
    text = (train.HERE / "model_attnres.py").read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    sys.modules.pop("model_mine", None)
    return train.load_module(path)

def test_fuse_knows_a_copy_and_refuses_a_changed_one(tmp_path, capsys):
    undo = K.fuse(copy_of(tmp_path, ('"attnres": {', '"mine": {')))
    assert "fused: model_mine: push, mix, GPT.begin, lm_loss" in capsys.readouterr().out
    undo()
    changed = copy_of(tmp_path, ("# (S, B, T), no 1/sqrt(C)", "/ 2"))
    with pytest.raises(ValueError, match="model_mine.py: .* push, mix"):
        K.fuse(changed)
    assert changed.mix.__module__ == "model_mine" # nothing was swapped

# -----------------------------------------------------------------------------
# Triton, interpreted

@pytest.mark.parametrize("S, R, C", [(1, 7, 48), (2, 64, 76), (7, 7, 257), (33, 1, 48), (65, 7, 24), (3, 7, 640)])
def test_attnres_kernels(chip, S, R, C):
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        V = [(torch.randn(R, C) + 100 * (S == 7)).to(dtype) for _ in range(S)] # once with a mean far from zero
        w, gain, dh = torch.randn(C) / C**0.5, torch.randn(C), torch.randn(R, C).to(dtype)
        eps, leaves = 1e-6, None
        def reference(V, w, gain, dh, dtype): # in the dtype of V with the mixing in FP32, or all in FP64
            leaves = [v.clone().requires_grad_() for v in (*V, w, gain)]
            up = lambda v: v.to(torch.promote_types(v.dtype, torch.float32))
            s = torch.stack([(up(v) * leaves[-2]).sum(-1) * torch.rsqrt(up(v).square().mean(-1) + eps) for v in leaves[:S]])
            O = sum(p * v for p, v in zip(s.softmax(0).unsqueeze(-1), leaves[:S])).to(V[0].dtype)
            h = (F.rms_norm(up(O), (C,), leaves[-1], eps)).to(V[0].dtype)
            return dict(enumerate((h.detach(), *torch.autograd.grad(h, leaves, dh))))
        want = reference([v.double() for v in V], w.double(), gain.double(), dh.double(), torch.float64)
        plain = reference(V, w, gain, dh, dtype)
        O, h, lse = K.chip_mix(V, w, gain, eps, eps)
        dO, D, dgain = K.chip_norm_backward(dh, O, gain, eps)
        table = [(dO.data_ptr(), lse.data_ptr(), D.data_ptr(), 0)]
        pulled = [K.chip_pull(v, table, w.unsqueeze(0), None, eps) for v in V]
        got = dict(enumerate((h, *(dV for dV, _, _ in pulled), sum(dq[0] for _, _, dq in pulled), dgain)))
        # all sources together, as the gradients of one may be tiny
        def error(x):
            join = lambda y: {"h": y[0], "V": torch.stack([y[i] for i in range(1, S + 1)]), "w": y[S + 1], "gain": y[S + 2]}
            x, y = join(x), join(want)
            return {n: ((x[n].double() - y[n]).abs().max() / y[n].abs().max()).item() for n in y if S > 1 or n != "w"} # one source needs no query
        floor = 1e-5 if S != 7 else 3e-4 # dq is a difference of sources: a mean of 100 costs digits
        for n, e in error(got).items():
            assert e < (floor if dtype == torch.float32 else max(2**-8, 2 * error(plain)[n])), (n, dtype, e, error(plain)[n])

@pytest.mark.parametrize("case, rows", [(attnres(1, n_embd=48), 1), (attnres(3, n_embd=76), 7), (attnres(3, 4), 7), (moda(3), 7), (moda(2, 6, 2, 36), 7),
                                        (moda(2, 2, 1, 76, rope_on_depth_k=True), 1), (moda(2, 2, 0, 12), 64)])
def test_models_on_triton(chip, case, rows):
    model = build(case[0], torch.float32, **case[1])
    x, dy = torch.randn(2, 1, rows, model.config.n_embd)
    want = stack(build(case[0], **case[1]), x.double(), dy.double())
    plain, got, again = stack(model, x, dy), fused(stack, model, x, dy), fused(stack, model, x, dy)
    assert worst(got, want) < max(1e-5, 2 * worst(plain, want))
    assert all(torch.equal(got[n], again[n]) for n in got)

def test_triton_limits(chip):
    with pytest.raises(RuntimeError, match="at most 16384 columns"):
        K.chip_mix([torch.ones(1, 70000)], torch.ones(70000), None, 0, 0)

# -----------------------------------------------------------------------------
# Triton, compiled ahead of time

def compiled():
    # kernel, arch, width -> (registers, bytes of shared memory, bytes of stack and local memory, i.e. spills)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kinds = {"table": "*i64", "eps": "fp32", "norm_eps": "fp32", "scale": "fp32"}
    fp32 = ("q_ptr", "gain_ptr", "lse_ptr", "D_ptr", "dgain_ptr", "c_ptr", "dq_ptr", "lse_seq_ptr", "O_ptr")
    slow = os.environ.get("NANODEPTH_SLOW") # all widths; else one for each device
    for arch, rows, heads in ((80, (1216,), (76,)), (90, (2048,), (64,))) if not slow else [(a, (640, 1024, 1216, 2048), (40, 64, 76, 128)) for a in (80, 90)]:
        for kernel, name, widths in ((K.attnres_fwd_kernel, "NORM", rows), (K.attnres_norm_bwd_kernel, "NORM", rows), (K.attnres_pull_kernel, "MORE", rows),
                                     (K.attnres_dq_kernel, None, (1024,)), (K.moda_fwd_kernel, "G", heads), (K.moda_bwd_kernel, "G", heads)):
            for C in widths:
                if name == "G":
                    constants = dict(D=C, **K.moda_blocks(2 if C == 128 else 1, C))
                else:
                    constants = K.blocks(torch.empty(1, C, dtype=torch.bfloat16)) | {name: True} if name else dict(BLOCK_M=16, BLOCK_R=32, BLOCK_C=64)
                options = {"num_warps": constants.pop("num_warps", 4)}
                moda = name == "G"
                types = {n: "constexpr" if n in constants else kinds.get(n) or ("i32" if not n.endswith("_ptr") else
                         "*fp32" if n in fp32 and not (moda and n in ("q_ptr", "dq_ptr")) else "*bf16") for n in kernel.arg_names}
                aligned = {(i,): [["tt.divisibility", 16]] for i, (n, t) in enumerate(types.items()) if t[0] == "*" or n in ("R", "C", "T")}
                source = ASTSource(kernel, types, {(kernel.arg_names.index(n),): v for n, v in constants.items()}, aligned)
                binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
                with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
                    Path(f.name).write_bytes(binary.asm["cubin"])
                    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
                    report = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True).stdout
                regs, stack, local = (int(re.search(rf"{word}:(\d+)", report)[1]) for word in ("REG", "STACK", "LOCAL"))
                yield kernel.fn.__name__, f"sm_{arch}", C, regs, binary.metadata.shared, stack + local, "ld.global.v" in binary.asm["ptx"]

def start_early(tmp):
    return subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TRITON_CACHE_DIR": str(tmp)}),

def test_kernels_compile_for_a100_and_h100(early):
    out, err = early[0].communicate(timeout=300)
    assert early[0].returncode == 0, err[-2000:]
    print(out)
    rows = [line.split("|") for line in out.splitlines()[1:]]
    assert len(rows) >= 12 and all(int(row[5]) == 0 for row in rows)

if __name__ == "__main__":
    print("kernel | arch | width | regs | shared | spills | vector loads")
    for row in compiled():
        print(" | ".join(map(str, row)))
