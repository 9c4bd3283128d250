"""
What does an architecture cost? Step time beside Pre-LN in the same run, memory, bytes moved.

    python bench.py                             # every architecture, plain and fused: forward and backward of the stack of blocks
    python bench.py hc attnres --n_layer 32 --n_embd 128 --rounds 11
    python bench.py preln --train               # training steps: embedding, head, loss, clipping and optimizer too
    python bench.py --report                    # kernels.py compiled ahead of time for sm_80 and sm_90; needs no GPU
    python bench.py --traffic                   # bytes per token of every op against the limit; on CUDA also its bandwidth

Every arm runs between two runs of plain Pre-LN, in turn; its time is divided by the mean of the two. Printed: median [quartiles].
Peak memory is what a step takes beside weights and input, in a process of its own.
"""
import argparse
import contextlib
import gc
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
from functools import partial
from types import SimpleNamespace

import torch

from train import TrainConfig, fail, find_models, make_optimizers, speed_up

PRELN = "preln", "plain" # the arm that all others are measured against
HOT = ("connect", "push", "mix", "depth_attention") # what fuse() swaps inside the stack; lm_loss is outside of it

def build(name, arm, args):
    # the model of an arm; the module is loaded once per arm, so that fusing one leaves the other plain
    path, overrides = find_models()[name]
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{arm}", path)
    if spec.name not in sys.modules:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    module, fields = sys.modules[spec.name], {**overrides, **vars(args)}
    model = module.GPT(module.GPTConfig(**{k: v for k, v in fields.items() if k in module.GPTConfig.__dataclass_fields__})).to(args.device)
    for p in model.parameters(): # zero gates and queries would be a special case
        torch.nn.init.normal_(p, std=0.02) if not p.any() else None
    with contextlib.redirect_stdout(sys.stderr):
        speed_up(model, SimpleNamespace(fused="on" if arm == "fused" else "off", compile=args.compile, device=args.device))
    return model

def make_arm(name, arm, args):
    # (forward, step, FLOPs of one sequence): forward leaves what its backward needs, step does both
    model, T = build(name, arm, args), args.block_size
    idx = torch.randint(args.vocab_size, (args.tokens // T, T + 1), device=args.device) # (B, T+1)
    x = torch.randn(args.tokens // T, T, args.n_embd, device=args.device, dtype=getattr(torch, args.dtype), requires_grad=True) # (B, T, C)
    dy = None if args.train else torch.randn_like(x) # (B, T, C)
    optimizers = make_optimizers(model, SimpleNamespace(**{**vars(TrainConfig()), "optimizer": args.optimizer})) if args.train else []

    def forward():
        with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            if args.train:
                return model(idx[:, :-1], idx[:, 1:])[1]
            state = model.begin(x)
            for block in model.h:
                state = block(state)
            return model.readout(state) # (B, T, C)

    def step():
        forward().backward(dy)
        if args.train:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        x.grad = None

    return forward, step, model.flops(T) - (0 if args.train else 2 * T * args.n_embd * args.vocab_size)

# -----------------------------------------------------------------------------
# Time and memory

def seconds(step, device):
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    step()
    sync()
    return time.perf_counter() - start

def interleave(steps, args):
    # {arm: (times divided by those of Pre-LN before and after, times)}
    out = {arm: ([], []) for arm in steps}
    for i in range(-2, args.rounds): # two rounds to warm up
        before = seconds(steps[PRELN], args.device)
        for arm, (ratios, times) in out.items():
            took, after = seconds(steps[arm], args.device), seconds(steps[PRELN], args.device)
            if i >= 0:
                ratios.append(2 * took / (before + after))
                times.append(took)
            before = after
        print(f"\rround {i + 1}/{args.rounds}", end="" if i + 1 < args.rounds else "\n", file=sys.stderr, flush=True)
    return out

def saved_bytes(forward):
    # what a forward pass leaves for its backward pass: autograd's saved tensors, and those that objects hold, as the ledger of AttnRes does
    def note(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    gc.collect()
    storages = {}
    list(map(note, (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor))))
    before, storages = storages, {}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = forward()
    gc.collect()
    list(map(note, (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t is not y)))
    return sum(n for ptr, n in storages.items() if ptr not in before)

def memory(what):
    # bytes of this process: VmRSS now, VmHWM at most; getrusage would count the parent too, up to exec
    with contextlib.suppress(OSError):
        return int(re.search(rf"{what}:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss # macOS: at most, in bytes

def peak_bytes(name, arm, args):
    # of two steps, beyond what rests: the device's, or this process's where it does nothing else
    _, step, _ = make_arm(name, arm, args)
    torch.set_num_threads(args.threads)
    cuda = args.device == "cuda"
    rest = torch.cuda.memory_allocated() if cuda else memory("VmRSS")
    step()
    step()
    return (torch.cuda.max_memory_allocated() if cuda else memory("VmHWM")) - rest

# What the compiler says of the kernels

def report(args):
    # what can be said without a device
    import kernels
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    if os.environ.get("TRITON_INTERPRET") == "1":
        fail("--report: TRITON_INTERPRET=1 replaces the compiler; unset it")
    tool, spilled = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump"), False
    print("| kernel | d | sm | regs | shared | spills |\n|---|---|---|---|---|---|")
    for d, sm in itertools.product(args.widths, (80, 90)):
        for name, kernel, signature, constexprs, warps in kernels.ahead_of_time(d):
            done = triton.compile(ASTSource(kernel, signature, constexprs), target=GPUTarget("cuda", sm, 32), options=dict(num_warps=warps))
            with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
                f.write(done.asm["cubin"])
                f.flush()
                used = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
            regs, stack, local = (int(re.search(rf"{k}:(\d+)", used)[1]) for k in ("REG", "STACK", "LOCAL"))
            print(f"| {name} | {d} | {sm} | {regs} | {done.metadata.shared} | {stack + local} |", flush=True)
            spilled |= stack + local > 0
    return int(spilled)

# What the ops move

def ops(R, device, n=4, C=1024, S=17, D=64, iters=20):
    # (op, vectors of one token at the limit, function) of R tokens in bfloat16: n streams, S sources of AttnRes, S - 1 slots of MoDA, heads of D
    import kernels as K
    make = lambda *shape, dtype=torch.bfloat16: torch.randn(shape, device=device).div(shape[-1] ** 0.5).to(dtype)
    fp32 = lambda *shape: make(*shape, dtype=torch.float32)
    X, y, dh, mix, write, gain = make(R, n, C), make(R, C), make(R, C), fp32(R, n, n), fp32(R, n), fp32(C)
    for kind, J in (("hc", n + 2), ("mgr", 2), ("mgr_independent", 2), ("mhc", n * n + 2 * n)):
        op, mhc = SimpleNamespace(kind=kind, eps=1e-6, norm_eps=1e-6, iters=iters, P=gain), kind == "mhc"
        forward, backward = (K.mhc_forward, K.mhc_backward) if mhc else (K.stream_forward, K.stream_backward)
        inputs, small = (op, X, y, mix, write, fp32(J, n * C if mhc else C), gain), (fp32(J), fp32(3)) if mhc else (fp32(n, J), fp32(J))
        out, saved = forward(*inputs, *small)
        yield f"{kind} forward", 2 * n + 2, partial(forward, *inputs, *small)
        yield f"{kind} backward", 3 * n + 3, partial(backward, *inputs, small, saved, dh, *map(torch.randn_like, out[1:]))
    V = [make(R, C) for _ in range(S)]
    mixes = lambda: [K.chip_mix(V[:i + 1], gain, gain, 1e-6, 1e-6) for i in range(S)]
    done = mixes()
    def pull():
        left = [K.chip_norm_backward(dh, O, gain, 1e-6) for O, _, _ in done]
        table = [(dO.data_ptr(), lse.data_ptr(), d.data_ptr(), 0) for (dO, d, _), (_, _, lse) in zip(left, done)]
        for i in reversed(range(S)):
            K.chip_pull(V[i], table[i:], gain.unsqueeze(0), None, 1e-6)
    yield f"attnres forward, all mixes of {S} sources", S * (S + 1) / 2 + S, mixes
    yield f"attnres backward, all mixes of {S} sources", S * (S + 1) / 2 + 4 * S, pull
    head = lambda: make(1, R, C // D, D).transpose(1, 2) # (1, H, R, D)
    slots, sums, (q, y_seq, y_, dy, dq) = [head() for _ in range(2 * S - 2)], [(head(), head()) for _ in range(S - 1)], (head().contiguous() for _ in range(5))
    lse, lse_seq = fp32(1, C // D, R), fp32(1, C // D, R)
    yield f"moda forward, {S - 1} slots", 2 * (S - 1), lambda: K.chip_moda(K.moda_fwd_kernel, slots, None, D ** -0.5, q, y_seq, y_, lse, lse_seq)
    yield f"moda backward, {S - 1} slots", 6 * (S - 1), lambda: K.chip_moda(K.moda_bwd_kernel, slots, sums, D ** -0.5, q, y_, dy, dq, lse)

def count_bytes(C=1024):
    # {op: (bytes per token, those at the limit)}: what the kernels load and store, seen by Triton's interpreter, an address once per launch,
    # of 2 tokens less that of 1, so that weights and queries, which all tokens share, do not count
    import numpy as np
    from triton.runtime import interpreter

    import kernels
    touched, total, builder, launch = {}, [0], interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__
    def noting(kind, call):
        def run(self, ptrs, *args): # of a store, the value comes before the mask
            size = ptrs.get_element_ty().primitive_bitwidth // 8
            touched.setdefault((kind, size), []).append(ptrs.data[args[kind == "store"].data.astype(bool)])
            return call(self, ptrs, *args)
        return run
    def counting(*args, **kwargs):
        launch(*args, **kwargs)
        total[0] += sum(size * len(np.unique(np.concatenate(ptrs))) for (_, size), ptrs in touched.items())
        touched.clear()
    patches = ((builder, "create_masked_load", noting("load", builder.create_masked_load)), (builder, "create_masked_store", noting("store", builder.create_masked_store)),
               (interpreter.GridExecutor, "__call__", counting), (kernels, "programs", lambda X: 1))
    out = []
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(unittest.mock.patch.object(*patch))
        for R in (1, 2):
            for op, limit, function in ops(R, "cpu", C=C, iters=1): # more steps of Sinkhorn move nothing
                total[0] = 0
                function()
                out.append((op, total[0], 2 * C * limit))
    return {op: (two - one, limit) for (op, one, limit), (_, two, _) in zip(out, out[len(out) // 2:])}

def traffic(args):
    # on CUDA each op is timed, and a copy of 1 GB beside it
    if os.environ.get("TRITON_INTERPRET") != "1": # counted in a process of its own, where kernels are interpreted
        code = "import bench, json; print(json.dumps(bench.count_bytes()))"
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, text=True)
        if done.returncode:
            fail(f"--traffic: {done.stderr.strip().splitlines()[-1]}")
        counted = json.loads(done.stdout)
    else:
        counted = count_bytes()
    cuda, R = args.device == "cuda", 8192
    middle = lambda f: statistics.median(seconds(f, "cuda") for _ in range(20))
    if cuda:
        a, b = torch.empty(2, 2**29, dtype=torch.uint8, device="cuda")
        b.copy_(a)
        copy = 2 * a.numel() / middle(lambda: b.copy_(a))
        print(f"copy: {copy / 1e9:,.0f} GB/s on {torch.cuda.get_device_name()}\n")
        times = {op: (function(), middle(function))[1] for op, _, function in ops(R, "cuda")} # the first call compiles
    print("| op | bytes/token moved | limit | ratio |" + " GB/s | of the copy |" * cuda + "\n|---|---|---|---|" + "---|---|" * cuda)
    for op, (moved, limit) in counted.items():
        print(f"| {op} | {moved:,.0f} | {limit:,.0f} | {moved / limit:.2f} |" + (f" {moved * R / times[op] / 1e9:,.0f} | {moved * R / times[op] / copy:.2f} |" if cuda else ""))

def table(args):
    arms = {arm: make_arm(*arm, args) for arm in args.arms}
    times = interleave({arm: step for arm, (_, step, _) in arms.items()}, args)
    print(f"{'Training step' if args.train else 'Forward and backward of the stack'}, {args.n_layer} blocks of width {args.n_embd}, {args.tokens} tokens in sequences of "
          f"{args.block_size}, {args.dtype}, {torch.cuda.get_device_name() if args.device == 'cuda' else f'{args.threads} CPU threads'}, torch {torch.__version__}, {args.rounds} rounds\n")
    print("| model | arm | x Pre-LN | ms | tokens/s | FLOPs x | peak MB | saved bytes/token/sub-layer |\n|---|---|---|---|---|---|---|---|")
    for (name, arm), (forward, _, flops) in arms.items():
        ratios, ms = times[name, arm][0], statistics.median(times[name, arm][1]) * 1e3
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(peak_bytes, (name, arm, args))
        low, mid, high = statistics.quantiles(ratios, n=4, method="inclusive")
        print(f"| {name} | {arm} | {mid:.3f} [{low:.3f} {high:.3f}] | {ms:.1f} | {args.tokens / ms * 1e3:,.0f} | {flops / arms[PRELN][2]:.3f} | {peak / 1e6:,.0f} | "
              f"{'' if args.compile else f'{saved_bytes(forward) / args.tokens / 2 / args.n_layer:,.0f}'} |", flush=True) # a compiled part hides what it saves

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names as of train.py --model; none: all")
    for name, default, text in (("n_layer", 8, "blocks"), ("n_head", 4, "heads"), ("n_embd", 256, "width"), ("block_size", 256, "tokens per sequence"), ("tokens", 1024, "tokens per step"),
                                ("vocab_size", 65, "with --train"), ("rounds", 9, "timed rounds, after two to warm up"), ("threads", torch.get_num_threads(), "CPU threads")):
        parser.add_argument("--" + name, type=int, default=default, help=f"{text} [{default}]")
    parser.add_argument("--arms", default="plain,fused", help="[plain,fused]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="[bfloat16 on cuda, else float32]")
    parser.add_argument("--compile", action="store_true", help="torch.compile all arms as train.py does")
    parser.add_argument("--train", action="store_true", help="time training steps")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"), help="with --train")
    parser.add_argument("--report", action="store_true", help="what the compiler says of the kernels, no timing")
    parser.add_argument("--traffic", action="store_true", help="the bytes that the kernels move")
    parser.add_argument("--widths", type=int, nargs="+", default=[640, 1024, 1216, 2048], help="with --report")
    args, known = parser.parse_args(argv), find_models()
    args.dtype, args.models = args.dtype or ("bfloat16" if args.device == "cuda" else "float32"), args.models or list(known)
    for name in args.models:
        if name not in known:
            fail(f"{name}: is not one of {', '.join(known)}")
    if args.tokens % args.block_size or args.rounds < 2:
        fail(f"--tokens {args.tokens} must be a multiple of --block_size {args.block_size}, --rounds {args.rounds} at least 2")
    if args.report or args.traffic:
        return report(args) if args.report else traffic(args)
    torch.set_num_threads(args.threads)
    swapped = lambda name: args.train or any(f"def {f}(" in known[name][0].read_text(encoding="utf-8") for f in HOT)
    args.arms = [PRELN, *((m, a) for m in args.models for a in args.arms.split(",") if (m, a) != PRELN and (a == "plain" or swapped(m)))]
    table(args)

if __name__ == "__main__":
    sys.exit(main())
