"""
Is the depth used? Measures and figures of the DepthBench, LayerRoPE and Multi-Gate Residuals papers.

    python analyze.py table out/*                          # from run directories: table, curves, shapes, lr
    python analyze.py causal out/preln-L16 out/hc-L16      # from checkpoints, side by side; by default on their validation data
    python analyze.py all out/mgr-L16 --samples 32         # every measure that the checkpoints allow
    python analyze.py norms model.safetensors --pattern 'layers\\.\\d+\\.post_attention_layernorm\\.weight'

Each measure writes <out_dir>/<measure>.json (numbers, settings, sample counts), then <measure>.png.
z_0 is the embedding, z_l the representation after l blocks (GPT.hidden), u_l = z_{l+1} - z_l; k counts the 2L sub-layers.
"""
import argparse
import contextlib
import itertools
import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from figures import FIGURES, curves, draw, lr, read_run, shapes, table
from train import Loader, fail, load_checkpoint, own_tokenizer

# -----------------------------------------------------------------------------
# Depth, family by family: what it means to skip, to swap and to read out

def next_mix(model, l): # AttnRes: the mix that reads what l blocks have left, at the boundary of blocks l - 1 and l
    return model.h[l].res_attn if l < len(model.h) else model.res_f

def newest(state): # its softmax, all on the newest source
    return torch.stack([torch.full_like(square, float(square is state[-1][1])) for _, square in state]) # (S, B, T)

def two_zero_slots(model, state): # MoDA: the keys and values of a skipped block are zero, and still take softmax weight
    (x, slots), c = state, model.config
    zero = x.new_zeros(len(x), c.n_kv_head, x.size(1), c.n_embd // c.n_head) # (B, Hkv, T, D)
    return x, slots + ((zero, zero),) * 2

PLAIN = dict(skip=lambda model, l: {model.h[l]: lambda state: state}, # {module: its forward} where block l is skipped
             swap=lambda model, i, j: [(model.h[i], model.h[j], "nothing")], # pairs to exchange, and the start of the names that stay
             lens=lambda model, state, l: model.hidden(state, l)) # what final norm and head read after l blocks
FAMILY = { # by a module of the block: where it is not PLAIN
    "kv_mlp": dict(PLAIN, skip=lambda model, l: {model.h[l]: lambda state: two_zero_slots(model, state)}),
    # AttnRes: a skipped block adds no source, and the one mix behind it returns the newest source; all other mixes still choose
    "res_mlp": dict(skip=lambda model, l: {model.h[l]: lambda state: state, next_mix(model, l + 1): newest},
                    swap=lambda model, i, j: [(model.h[i], model.h[j], "res_attn."), (next_mix(model, i + 1), next_mix(model, j + 1), "nothing")],
                    lens=lambda model, state, l: sys.modules[type(model).__module__].mix(state, next_mix(model, l))),
    "hc_mlp": dict(PLAIN, lens=lambda model, state, l: model.readout(state)),
    "mhc_mlp": dict(PLAIN, lens=lambda model, state, l: model.readout(state))}

def family(model):
    return next((rules for name, rules in FAMILY.items() if hasattr(model.h[0], name)), PLAIN)

def swap(model, i, j):
    # exchanges every tensor and buffer that blocks i and j have under one name with one shape; twice is the identity
    for a, b, stay in family(model)["swap"](model, i, j):
        a, b = ({k: v for k, v in (*m.named_parameters(), *m.named_buffers()) if not k.startswith(stay)} for m in (a, b))
        for name in a.keys() & b.keys():
            if a[name].shape == b[name].shape:
                a[name].data, b[name].data = b[name].data, a[name].data

@contextlib.contextmanager
def replaced(forwards):
    # {module: another forward}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward

# -----------------------------------------------------------------------------
# Measures: (model, batches of x, y (B, T), args) -> {name: numbers}; under @averaged (model, x, y, args) -> {name: (B, ...)}, a row for each window

class Unfit(Exception):
    """The measure has no meaning for this kind of checkpoint."""

def over(rows, batches):
    # {name: (windows, ...)}; only what rows(x, y) gives for each batch is kept
    parts = [{name: v.double().cpu() for name, v in rows(x, y).items()} for x, y in batches]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

def averaged(rows):
    # the measure that is the mean over windows of rows(model, x, y, args); of what is called largest_.., (windows, ..., k), the k largest of all
    def measure(model, batches, args):
        largest = lambda v: v.movedim(0, -2).flatten(-2).topk(v.size(-1)).values.movedim(-1, 0).squeeze(0)
        return {k: largest(v) if k.startswith("largest") else v.mean(0) for k, v in over(lambda x, y: rows(model, x, y, args), batches).items()}
    return measure

def states(model, state, start=0):
    # (l, state after l blocks), l = start .. L, from token ids or from the state after `start` blocks
    state = model.begin(model.embed(state)) if torch.is_tensor(state) and state.dtype == torch.int64 else state
    yield start, state
    for l in range(start, len(model.h)):
        state = model.h[l](state)
        yield l + 1, state

def losses(model, states, y):
    # mean loss of each window (B) at the last of the states, the logits of one window at a time
    x = model.readout(list(states)[-1][1]) # (B, T, C)
    return torch.stack([model.head(x[b:b + 1], y[b:b + 1])[1] for b in range(len(y))])

def returned(model, x, names=r"(?<!norm)_(attn|mlp|f)$", inputs=False):
    # {module: what it returned, or was given, in one pass}, in order; by default the routing modules <thing>_attn, <thing>_mlp, <thing>_f
    found, modules = {}, [m for name, m in model.named_modules() if re.search(names, name)]
    hooks = [m.register_forward_hook(lambda m, args, out: found.update({m: args[0] if inputs else out})) for m in modules]
    model.trunk(x)
    for hook in hooks:
        hook.remove()
    return found

def linear(model, x, norm, branch):
    # the coefficients of a pass over x held, and norm(k, h) and branch(k, *inputs) in the place of those of sub-layer k
    found = returned(model, x)
    forwards = {m: lambda *args, out=out: out for m, out in found.items()}
    for k, (block, part) in enumerate(itertools.product(model.h, ("attn", "mlp"))):
        if not hasattr(block, f"norm_{part}") or not set(block.children()) - found.keys() <= {block.norm_attn, block.attn, block.norm_mlp, block.mlp}:
            raise Unfit("what its sub-layers write is normed or scaled")
        forwards |= {getattr(block, f"norm_{part}"): lambda h, k=k: norm(k, h), getattr(block, part): lambda *inputs, k=k: branch(k, *inputs)}
    return replaced(forwards)

def unit(model, n, x): # (B, T, n, n), a unit vector for each of n
    return torch.eye(n, dtype=model.lm_head.weight.dtype, device=x.device).expand(*x.shape, -1, -1)

def distances(z):
    # z (L+1, T, C) -> arccos(cos) / pi of any two states, mean over tokens; row n - 1, column l: from z_l to z_{l+n}, nan beyond
    u = F.normalize(z.double(), dim=-1).transpose(0, 1) # (T, L+1, C)
    d = (u @ u.mT).clamp(-1, 1).acos().mean(0) / math.pi # (L+1, L+1)
    return torch.stack([F.pad(d.diagonal(n), (0, n - 1), value=math.nan) for n in range(1, len(d))]) # (L, L)

@averaged
def angular(model, x, y, args):
    # d(z_l, z_{l+n}) (DepthBench, Eq. 2)
    z = [model.hidden(state, l) for l, state in states(model, x)]
    distance = torch.stack([distances(torch.stack([v[b] for v in z])) for b in range(len(x))]) # (B, L, L)
    return dict(distance=distance, profile=distance.nanmean(2))

@averaged
def streams(model, x, y, args):
    # of each residual stream: the largest entry where sub-layer k reads it (MGR, Figures 6, 12), and the angular distance to itself n blocks on
    # where attention reads it (Figure 3)
    windows = []
    for b in range(len(x)):
        X = [v[0] for v in returned(model, x[b:b + 1], inputs=True).values() if torch.is_tensor(v) and v.dim() == 4] # (T, S, C) for each reader
        if not X:
            raise Unfit("it has no residual streams; hc, mhc and mgr have")
        X = torch.stack([F.pad(v, (0, 0, 0, X[-1].size(1) - v.size(1)), value=math.nan) for v in X]) # (K, T, N, C), nan: not there yet
        distance = torch.stack([distances(z) for z in X[::2].unbind(2)]) # (N, L, L)
        windows.append(dict(distance=distance, profile=distance.nanmean(2), largest=X.abs().amax((1, 3)).T.unsqueeze(-1))) # (N, K, 1)
    return {k: torch.stack([w[k] for w in windows]) for k in windows[0]}

def late(scores, threshold):
    # scores (L, L) of pairs s < l; of those with s >= L/4 the part above the paper's threshold, and above every other (Eq. 5 to 8)
    L, grid = len(scores), torch.linspace(0, 1, 101)
    pairs = torch.stack([scores[s, l] for s in range(-(-L // 4), L) for l in range(s + 1, L)] or [scores.new_tensor(math.nan)])
    return dict(scores=scores.masked_fill(torch.ones(L, L).tril().bool(), math.nan), threshold=threshold, fraction=(pairs > threshold).double().mean(),
                thresholds=grid, fractions=(pairs > grid.unsqueeze(1)).double().mean(1))

def causal(model, batches, args):
    # C(s, l) = ||change of u_l where block s is skipped|| / ||u_l||, mean over tokens (Eq. 3)
    def rows(x, y):
        z, out = [model.hidden(state, l) for l, state in states(model, x)], torch.zeros(len(x), len(model.h), len(model.h))
        for s, clean in itertools.islice(states(model, x), len(model.h)): # run once more rather than kept
            with replaced(family(model)["skip"](model, s)):
                for l, state in states(model, clean, s):
                    after = model.hidden(state, l)
                    if l > s + 1: # the update of block l - 1
                        u = z[l] - z[l - 1] # (B, T, C)
                        out[:, s, l - 1] = ((after - before - u).norm(dim=-1) / u.norm(dim=-1).clamp(min=1e-8)).mean(1)
                    before = after
        return dict(scores=out)
    return late(over(rows, batches)["scores"].mean(0), 0.45)

def permutation(model, batches, args):
    # P(i, j) = |loss with blocks i and j exchanged - loss| / loss (Eq. 4); the blocks below i run once
    def rows(x, y):
        swapped = torch.zeros(len(x), len(model.h), len(model.h), dtype=torch.float64)
        for i, state in states(model, x):
            for j in range(i + 1, len(model.h)):
                swap(model, i, j)
                swapped[:, i, j] = losses(model, states(model, state, i), y)
                swap(model, i, j)
        return dict(swapped=swapped, loss=losses(model, [(i, state)], y))
    found = over(rows, batches)
    loss = found["loss"].mean()
    return dict(loss=loss, **late((found["swapped"].mean(0) - loss).abs() / loss, 0.15))

def prune(model, batches, args):
    # what loss and perplexity gain where block l is skipped; with --task the accuracy too (DepthBench, Figure 8; MGR, Figure 4)
    skip = lambda l: replaced(family(model)["skip"](model, l) if l < len(model.h) else {})
    def rows(x, y):
        out = []
        for l, state in states(model, x):
            with skip(l):
                out.append(losses(model, states(model, state, l), y))
        return dict(loss=torch.stack(out, dim=1)) # (B, L+1), the last with all blocks
    *loss, clean = over(rows, batches)["loss"].mean(0)
    result = dict(loss=clean, loss_change=[v - clean for v in loss], perplexity_change=[v.exp() - clean.exp() for v in loss])
    if args.task:
        from evaluate import get_tokenizer, read_task, score # they need tiktoken
        examples, result["accuracy"] = read_task(args.task), []
        if len(examples[0]) != 3:
            fail(f"--task: {args.task} is not multiple choice")
        for l in range(len(model.h) + 1):
            with skip(l):
                result["accuracy"].append(score(model, get_tokenizer(args.tokenizer), examples, args.batch)["acc"])
        result["accuracy_change"] = [v - result["accuracy"][-1] for v in result["accuracy"][:-1]]
    return result

@averaged
def lens(model, x, y, args):
    # KL(final prediction || prediction from the state after l blocks) in nats per token
    logp = lambda h: model.head(h.unsqueeze(0))[0].log_softmax(-1) # (1, T, V), of one window
    kl = lambda h, final: F.kl_div(logp(h), final, log_target=True, reduction="sum") / len(h)
    windows = zip(*(family(model)["lens"](model, state, l) for l, state in states(model, x))) # B of L+1 of (T, C)
    return dict(kl=torch.stack([torch.stack([kl(h, final) for h in w]) for w in windows for final in [logp(w[-1])]])) # (B, L+1)

@averaged
def paths(model, x, y, args):
    # w_{i->k}: how much of source i (0: embedding, i: output of sub-layer i - 1) is in the pre-norm input of sub-layer k (last: of the head), mean
    # over tokens. With the coefficients of a true pass held, the inputs are linear in the outputs: unit vectors in, weights out (Figure 7)
    K, reads = 2 * len(model.h), {}
    one = unit(model, K + 1, x)
    def branch(k, *inputs):
        if k not in reads or len(inputs) > 1:
            raise Unfit("its stream is normed, or its sub-layers read more than the stream")
        return one[..., k + 1, :] # (B, T, K+1)
    with linear(model, x, reads.setdefault, branch):
        reads[K] = model.readout(list(states(model, model.begin(one[..., 0, :])))[-1][1])
    weights = torch.stack([reads[k].mean(1) for k in range(K + 1)], dim=1) # (B, K+1, K+1)
    return dict(weights=weights.masked_fill(torch.ones_like(weights[0]).triu(1).bool(), math.nan))

def products(model, x):
    # (B, T, L+1, N, N): the product of all residual maps up to block l; row j: what of each stream of the start is in stream j now
    n = model.hidden(next(states(model, x))[1], 0).size(-1) // model.config.n_embd
    if n < 2:
        raise Unfit("it has no residual maps between streams; hc and mhc have")
    with linear(model, x, lambda k, h: h, lambda k, h: torch.zeros_like(h)): # stream i starts as unit vector i
        return torch.stack([model.hidden(state, l).unflatten(-1, (n, n)) for l, state in states(model, (unit(model, n, x),))], dim=2)

def transport(model, batches, args):
    # of these products: effective rank, how parallel the ways of the streams (columns) are, singular values (Figure 10)
    def rows(x, y):
        P = products(model, x).double()
        s, u, n = torch.linalg.svdvals(P), F.normalize(P, dim=-2), P.size(-1) # (B, T, L+1, N), (B, T, L+1, N, N)
        p, cos = s / s.sum(-1, keepdim=True), ((u.mT @ u).abs().sum((-1, -2)) - n) / (n * (n - 1)) # (B, T, L+1, N), (B, T, L+1)
        return dict(effective_rank=(-torch.xlogy(p, p).sum(-1)).exp().mean(1), cosine=cos.mean(1), singular_values=(s[:, :, -1] / s[:, :, -1, :1]).mean(1))
    result, rng = {}, np.random.default_rng(args.seed)
    for name, v in over(rows, batches).items():
        v = v.numpy()
        draws = [v[rng.integers(len(v), size=len(v))].mean(0) for _ in range(1000)]
        result[name] = v.mean(0)
        result[f"{name}_error"] = np.abs(np.quantile(draws, (0.025, 0.975), axis=0) - v.mean(0)) # to the ends of the bootstrap interval over windows, 95 %
    return result

@averaged
def block_mix(model, x, y, args):
    # Block AttnRes: the weight on the running sum at reader k = 1 .. 2L, null where its newest source is complete (Figure 9)
    p = [out for out in returned(model, x).values() if torch.is_tensor(out)] # (S, B, T) for each reader
    sizes = [len(v) for v in p]
    if len(set(sizes)) == len(sizes):
        raise Unfit("it has no running sum; attnres_block has")
    running = [a == b for a, b in zip(sizes, sizes[1:])] + [True] # the output that followed joined the newest source
    return dict(running_sum=torch.stack([v[-1].mean(-1) * (1 if r else math.nan) for v, r in zip(p, running)], dim=1)) # (B, 2L)

@averaged
def gates(model, x, y, args):
    # the write gates beta of the sub-layers that have them, over tokens: share in each of 100 bins, mean by stream, largest (MGR, Figures 7, 13)
    betas = [out[1] for out in returned(model, x).values() if isinstance(out, tuple) and len(out) == 2 and out[1].dim() == 3] # (B, T, N)
    if not betas:
        raise Unfit("it has no write gates; mgr has")
    bins = torch.stack([torch.stack([w.float().cpu().histc(100, 0, 1) / w.numel() for w in b]) for b in betas], dim=-1) # (B, 100, K)
    return dict(distribution=bins, below_tenth=bins[:, :10].sum(1), mean=torch.stack([b.mean(1) for b in betas], dim=-1), # (B, N, K)
                largest=torch.stack([b.amax((1, 2)) for b in betas], dim=1).unsqueeze(-1)) # (B, K, 1)

@averaged
def variance(model, x, y, args):
    # of z_l over features and tokens but the first (LayerRoPE, Figure 8), and its norm (MGR, Figure 2)
    z = [model.hidden(state, l).double() for l, state in states(model, x)] # (B, T, C) each
    return dict(variance=torch.stack([v[:, 1:].var((1, 2), correction=0) for v in z], dim=1), norm=torch.stack([v.norm(dim=-1).mean(1) for v in z], dim=1))

@averaged
def massive(model, x, y, args):
    # the three largest absolute entries of z_l and of what attention and MLP return, over all tokens (MGR, Figures 5, 10)
    outputs = lambda part: [v[0] if isinstance(v, tuple) else v for v in returned(model, x, rf"h\.\d+\.{part}$").values()]
    parts = dict(hidden=[model.hidden(state, l) for l, state in states(model, x)], attn=outputs("attn"), mlp=outputs("mlp")) # (B, T, C) each
    return {f"largest_{part}": torch.stack([v.abs().flatten(1).topk(3).values for v in vs], dim=1) for part, vs in parts.items()} # (B, L+1 or L, 3)

def grads(model, batches, args):
    # norm of the gradient of the mean loss, block by block
    model.zero_grad()
    with torch.enable_grad():
        count = sum(model(x[b:b + 1], y[b:b + 1])[1].backward() or 1 for x, y in batches for b in range(len(x)))
    norm = lambda part: sum(p.grad.double().square().sum().item() for p in part.parameters() if p.grad is not None) ** 0.5 / count
    return dict(gradient={name: [norm(part(b)) for b in model.h] for name, part in dict(block=lambda b: b, attn=lambda b: b.attn, mlp=lambda b: b.mlp).items()})

def schedule(model, batches, args):
    # exp(r(l)) and theta(l) of the fastest pair in degrees, at each site, and the slopes (LayerRoPE, Figures 19, 20)
    if not hasattr(model, "depth"):
        raise Unfit("it has no depth schedule; layerrope has")
    ln, sites = torch.arange(1, len(model.h) + 1).log(), model.depth.items()
    return dict(multiplier={k: (float(s.alpha) + float(s.beta) * ln).exp() for k, s in sites}, slope={k: float(s.beta) for k, s in sites},
                rotation={k: (float(s.alpha_rot) + float(s.beta_rot) * ln).exp().rad2deg() for k, s in sites},
                rotation_slope={k: float(s.beta_rot) for k, s in sites})

def gains(model):
    # {name: norm gain in effect}: LNS's factor and LayerRoPE's depth are folded in
    tensors = {}
    for l, block in enumerate(model.h):
        tensors |= {name: w * getattr(block, "scale", 1.0) for name, w in block.named_parameters(f"h.{l}") if "norm_" in name}
        tensors |= {f"h.{l}.norm_{site}.weight": gain(block.row, block.log_depth) for site, gain in getattr(block, "depth", ({},))[0].items()}
    return tensors

def norms(tensors, batches, args):
    # {name: tensor} -> of the norm gains, layer by layer: mean, 95 % quantile, norm over that of the first layer, some dimensions one by one, angle in
    # the plane of a classical MDS of their vectors (LayerRoPE, Figures 2, 3, 21)
    sites, out = {}, dict(mean={}, q95={}, ratio={}, angle={}, arc={}, explained={}, dimensions={})
    for name in filter(re.compile(args.pattern).search, tensors):
        sites.setdefault(re.sub(r"\d+", "*", name, count=1), {})[int(re.search(r"\d+", name)[0])] = tensors[name].double().cpu()
    if not sites:
        raise Unfit(f"no tensor has a name like {args.pattern}")
    for site, found in sites.items():
        layers, X = sorted(found), torch.stack([found[l] for l in sorted(found)]) # (layers, C)
        u, s, _ = torch.linalg.svd(X - X.mean(0), full_matrices=False)
        at, size = F.pad(u * s, (0, 1)), X.norm(dim=1) # (layers, 2 or more), (layers)
        angle = np.degrees(np.unwrap(at[:, 1].atan2(at[:, 0]).numpy()))
        line = lambda v: [dict(zip(layers, v)).get(l, math.nan) for l in range(layers[-1] + 1)] # a layer without this norm: nan
        values = dict(mean=line(X.mean(1)), q95=line(X.quantile(0.95, dim=1)), ratio=line(size / size[0]), angle=line(angle - angle[0]), arc=np.ptp(angle),
                      explained=s[:2].square().sum() / s.square().sum(), dimensions=[line(v) for v in X.T[slice(*args.dims)]])
        for key, value in values.items():
            out[key][site] = value
    return out

def read_tensors(path, pattern):
    # {name: tensor} of a .safetensors file (8 bytes: length of the JSON header), or of a .pt state dict
    if path.suffix != ".safetensors":
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        return tensors.get("model", tensors)
    raw = np.memmap(path, mode="r")
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    kinds = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
    read = lambda v: torch.frombuffer(bytearray(raw[start + v["data_offsets"][0]:start + v["data_offsets"][1]]), dtype=kinds[v["dtype"]]).view(v["shape"])
    return {name: read(v) for name, v in json.loads(raw[8:start].tobytes()).items() if re.search(pattern, name)}

def cost(model, batches, args):
    # a prefill of --batch sequences of --seq_len tokens, logits at the last position: FLOPs and KV cache of one sequence, memory and time of all
    c, T, device = model.config, min(args.seq_len, model.config.block_size), model.lm_head.weight.device
    idx = torch.zeros(args.batch, T, dtype=torch.int64, device=device)
    def prefill():
        start = time.perf_counter()
        model.head(model.trunk(idx)[:, -1:])[0].sum().item() # waits for the device
        return time.perf_counter() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile: # this pass also warms up
        prefill()
    events = sorted((e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else max(itertools.accumulate(n for _, n in events)) + 4 * model.num_params()
    values = dict(ratio=c.n_embd / c.n_layer, flops=model.flops(T) - 2 * (T - 1) * c.n_embd * c.vocab_size,
                  kv_bytes=8 * c.n_layer * c.n_kv_head * (c.n_embd // c.n_head) * T, peak_bytes=peak, seconds=sorted(prefill() for _ in range(5))[2])
    return {k: [v] for k, v in values.items()}

# -----------------------------------------------------------------------------
# Output

MEASURES = { # name: (function, windows by default; None: it reads run directories)
    "table": (table, None), "curves": (curves, None), "shapes": (shapes, None), "lr": (lr, None),
    "angular": (angular, 1024), "streams": (streams, 512), "causal": (causal, 128), "permutation": (permutation, 128), "prune": (prune, 128),
    "lens": (lens, 128), "paths": (paths, 512), "transport": (transport, 512), "block_mix": (block_mix, 512), "gates": (gates, 512),
    "variance": (variance, 512), "massive": (massive, 512), "grads": (grads, 128), "schedule": (schedule, 0), "norms": (norms, 0), "cost": (cost, 0)}

def as_json(x): # tensors, arrays and paths too; null for nan and inf, so that any program reads it
    text = json.dumps(x, indent=1, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))
    return re.sub(r"^( *(?:\".*\": )?)(?:NaN|-?Infinity)(?=,?$)", r"\1null", text, flags=re.M) + "\n"

def measured(name, path, args):
    # what one measure says of one checkpoint, None where it does not apply
    if name == "norms" and path.is_file():
        try:
            return dict(name=str(path), label=path.name, model="", **norms(read_tensors(path, args.pattern), [], args))
        except Exception as e: # a damaged file fails in many ways
            fail(f"{path}: {e if isinstance(e, Unfit) else 'is neither a safetensors file nor a state dict'}")
    (model, ckpt), (function, windows), batches = load_checkpoint(path), MEASURES[name], []
    config, T = ckpt["config"], min(args.seq_len, model.config.block_size)
    about = dict(name=path.name, label=f"{config['model']} L{model.config.n_layer} d{model.config.n_embd}", model=config["model"], seq_len=T)
    args.tokenizer = args.typed_tokenizer or own_tokenizer(ckpt) if args.task else ""
    if windows:
        loader = Loader(args.data or config["data"], "val", T)
        order = np.random.default_rng(args.seed).permutation(len(loader))[:args.samples or windows].tolist()
        chunks = tqdm([order[i:i + args.batch] for i in range(0, len(order), args.batch)], desc=f"{name} {path.name}", disable=None)
        batches, about["samples"] = (tuple(t.to(args.device) for t in loader.batch(chunk)) for chunk in chunks), len(order)
    try:
        return dict(about, **function(gains(model) if name == "norms" else model.to(args.device), batches, args))
    except Unfit as e:
        if args.measure != "all":
            print(f"error: {name}: {path.name} ({config['model']}): {e}", file=sys.stderr)

def write(name, runs, args):
    # <name>.json, then <name>.png: the numbers survive whatever happens to the figure
    labels = [r["label"] for r in runs]
    if MEASURES[name][1] is not None: # checkpoints of one model and shape: tell them apart
        runs = [r if labels.count(r["label"]) == 1 else dict(r, label=r["name"]) for r in runs]
    settings = {k: v for k, v in vars(args).items() if k not in ("measure", "paths", "out_dir", "csv")}
    args.out_dir.mkdir(parents=True, exist_ok=True)
    text = as_json(dict(measure=name, settings=settings, runs=runs))
    (args.out_dir / f"{name}.json").write_text(text, encoding="utf-8")
    draw(*FIGURES[name], json.loads(text)["runs"]).savefig(args.out_dir / f"{name}.png", dpi=110)
    print(args.out_dir / f"{name}.png")

@torch.no_grad()
def main(argv=None):
    parser = argparse.ArgumentParser(prog="analyze.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = lambda message: fail(message, 2)
    flag = parser.add_argument
    flag("measure", choices=[*MEASURES, "all"])
    flag("paths", nargs="+", type=Path, help="run directories, or checkpoints")
    flag("--out_dir", default="out/analysis", type=Path, help="where JSON and PNG go")
    flag("--csv", help="table: every run, one line each, into this file")
    flag("--data", help="directory of shards, by default the one that each checkpoint was trained on; the validation split is read")
    flag("--samples", type=int, default=0, help="windows; 0: as many as the papers take")
    flag("--seq_len", type=int, default=512, help="tokens of a window, at most the model's block_size")
    flag("--seed", type=int, default=0, help="which windows, and the bootstrap")
    flag("--batch", type=int, default=8, help="windows at a time")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"][:1 + torch.cuda.is_available()])
    flag("--task", help="prune: a multiple-choice task of evaluate.py, or a JSONL file of {prompt, choices, answer}")
    flag("--tokenizer", dest="typed_tokenizer", help="prune --task: by default the checkpoint's")
    flag("--pattern", default=r"h\.\d+\.norm_\w+\.weight", help="norms: names of the gains, the first number being the layer")
    flag("--dims", type=int, nargs=2, default=[0, 128], metavar=("FIRST", "END"), help="norms: dimensions that are shown one by one")
    args = parser.parse_args(argv)
    if min(args.seq_len, args.batch, args.samples + 1) < 1:
        fail(f"--seq_len, --batch, --samples: {args.seq_len}, {args.batch}, {args.samples} must be positive")
    status = 0
    try:
        re.compile(args.pattern)
        for name in [args.measure] if args.measure != "all" else [n for n, (_, windows) in MEASURES.items() if windows is not None]:
            function, windows = MEASURES[name]
            if windows is None:
                runs = list(function(list(map(read_run, args.paths)), args) or [])
            else:
                runs = [r for r in (measured(name, path, args) for path in args.paths) if r]
                status |= len(runs) < len(args.paths) and args.measure != "all"
            if runs:
                write(name, runs, args)
    except re.error as e:
        fail(f"--pattern: {e}")
    except OSError as e:
        fail(f"{e.filename}: {e.strerror}")
    return int(status)

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace") # a path that the terminal's encoding lacks
    sys.exit(main())
