"""
Oracles of analyze.py: every measure against a closed form, a literal forward or autograd, on random models in FP64.

    python -m pytest -q tests/test_analyze.py
"""
import copy
import json
import math
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import analyze
import train
from figures import FIGURES, draw

ARGS = SimpleNamespace(seed=0, dims=[0, 3], pattern=r"h\.\d+\.norm_\w+\.weight", seq_len=8, batch=2, samples=0, task=None, tokenizer="bytes")
NAMES = sorted(train.find_models())
L, V, B, T = 4, 32, 2, 6
X = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(2))
DATA = [(X[:1], Y[:1]), (X[1:], Y[1:])] # two batches: sums over batches are under test too

def make(name, n_layer=L, randomise=True, vocab_size=V, **fields):
    if name not in NAMES:
        pytest.skip(f"no model file has {name}")
    torch.manual_seed(0)
    model = train.build(name, n_layer=n_layer, n_head=2, n_embd=16, vocab_size=vocab_size, block_size=8, **fields).double().eval()
    for p in model.parameters() if randomise else []: # zero init hides mistakes
        p.data += 0.3 * torch.randn_like(p)
    return model

@pytest.fixture(autouse=True)
def quiet():
    threads = torch.get_num_threads()
    torch.set_num_threads(1) # the tensors are tiny
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)

def run(measure, model, data=DATA, **args):
    return json.loads(analyze.as_json(getattr(analyze, measure)(model, data, SimpleNamespace(**{**vars(ARGS), **args}))))

def tensors(model):
    return {k: v.clone() for k, v in (*model.named_parameters(), *model.named_buffers())}

def lower(K): # the places of a (K, K) map that have a value
    return np.tril(np.ones((K, K), bool))

# -----------------------------------------------------------------------------
# Skip and swap: every rule of the conventions against a literal forward

def literal(model, order, state=None):
    # the blocks named in order, one after the other
    state = model.begin(model.embed(X))
    for l in order:
        state = model.h[l](state)
    return model.readout(state)

def skipped(model, s):
    with analyze.replaced(analyze.family(model)["skip"](model, s)):
        return model.trunk(X)

@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(("attnres", "moda"))])
def test_skip_is_the_model_without_that_block(name):
    model = make(name)
    whole = model.trunk(X)
    for s in range(L):
        without = copy.deepcopy(model)
        del without.h[s]
        assert torch.equal(skipped(model, s), without.trunk(X))
        assert not torch.allclose(whole, without.trunk(X))
    assert torch.equal(model.trunk(X), whole) # and is over afterwards

@pytest.mark.parametrize("s", range(L))
@pytest.mark.parametrize("name, fields", [("attnres", {}), ("attnres_block", dict(source_block=3)), ("attnres_block", dict(source_block=4))])
def test_skip_attnres(name, fields, s):
    # literally: no source is added; the mix that follows the skipped block returns its newest source
    model, sources = make(name, **fields), []
    b = model.config.source_block
    def mix(res, follows):
        if res is None or follows:
            return sources[-1]
        p = torch.stack([F.rms_norm(v, (16,), res.g, model.config.norm_eps) @ res.w for v in sources]).softmax(0)
        return (p.unsqueeze(-1) * torch.stack(sources)).sum(0)
    def add(k, v):
        sources.append(v) if k % b == 0 or len(sources) == 1 else sources.__setitem__(-1, sources[-1] + v)
    sources.append(model.wte(X))
    for l, block in enumerate(model.h):
        if l != s:
            add(2 * l, block.attn(block.norm_attn(mix(block.res_attn, l == s + 1))))
            add(2 * l + 1, block.mlp(block.norm_mlp(mix(block.res_mlp, False))))
    torch.testing.assert_close(skipped(model, s), mix(model.res_f, s == L - 1))
    assert not torch.allclose(skipped(model, s), mix(model.res_f, s != L - 1)) # the twin: the other mix stands in

@pytest.mark.parametrize("s", range(L))
@pytest.mark.parametrize("name", ["moda", "moda_postln"])
def test_skip_moda(name, s):
    # literally: the skipped block's two slots hold zeros
    model = make(name)
    def forward(slots_of_skipped):
        x, slots = model.begin(model.embed(X))
        for l, block in enumerate(model.h):
            x, slots = block((x, slots)) if l != s else (x, slots + slots_of_skipped)
        return x
    zero = torch.zeros(B, 2, T, 8, dtype=torch.float64)
    torch.testing.assert_close(skipped(model, s), forward(((zero, zero), (zero, zero))), rtol=0, atol=0)
    if s < L - 1: # the twin: without the slots the softmax has two entries less
        assert not torch.allclose(skipped(model, s), forward(()))

PAIRS = [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]

@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(("attnres", "moda", "keel", "mgr"))])
def test_swap_is_the_other_order(name):
    # where all blocks have the same tensors, a swap is the blocks in another order: LNS's factor and LayerRoPE's ln(l+1) travel
    model = make(name)
    for i, j in PAIRS:
        order = list(range(L))
        order[i], order[j] = j, i
        want, before = literal(model, order), tensors(model)
        analyze.swap(model, i, j)
        torch.testing.assert_close(model.trunk(X), want, rtol=0, atol=0)
        assert not torch.allclose(want, literal(model, order))
        analyze.swap(model, i, j)
        assert all(torch.equal(v, before[k]) for k, v in tensors(model).items())

@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("attnres", "moda", "keel", "mgr"))])
def test_swap_name_by_name(name):
    # literally: exchange what has a partner under the same name with the same shape; AttnRes's mixes move with the block before them
    model = make(name)
    for i, j in PAIRS:
        check_swap(name, model, i, j)

def check_swap(name, model, i, j):
    before, want = tensors(model), tensors(model)
    def at(l): # where the mix after block l lives
        return f"h.{l + 1}.res_attn." if l + 1 < L else "res_f."
    for k in before:
        mix = name.startswith("attnres") and "res_attn" in k or k.startswith("res_f")
        pairs = [(at(i), at(j)), (at(j), at(i))] if mix else [(f"h.{i}.", f"h.{j}."), (f"h.{j}.", f"h.{i}.")]
        for a, b in pairs:
            partner = before.get(k.replace(a, b, 1), torch.zeros(0))
            if k.startswith(a) and partner.shape == before[k].shape:
                want[k] = partner
    analyze.swap(model, i, j)
    now = tensors(model)
    assert all(torch.equal(now[k], v) for k, v in want.items())
    assert any(not torch.equal(now[k], v) for k, v in before.items())
    analyze.swap(model, i, j)
    assert all(torch.equal(v, before[k]) for k, v in tensors(model).items())

def test_what_stays_in_a_swap():
    keel, moda, mgr = make("keel"), make("moda"), make("mgr")
    stays = lambda model, k, i, j: (torch.equal(tensors(model)[k], (analyze.swap(model, i, j), tensors(model))[1][k]))
    assert stays(keel, "h.2.norm_attn_out.weight", 0, 2) and not stays(keel, "h.1.norm_attn_out.weight", 1, 2)
    assert stays(moda, "h.0.kv_mlp.weight", 0, L - 1) and not stays(moda, "h.0.kv_mlp.weight", 0, 1)
    assert stays(mgr, "h.3.mgr_attn.w_b", 0, 3) and not stays(mgr, "h.3.mgr_attn.w_b", 2, 3)

# -----------------------------------------------------------------------------
# Angular distance, causal and permutation scores, prune, lens

def test_angular():
    model = make("preln")
    z, state = [model.wte(X)], model.wte(X)
    for block in model.h:
        z.append(state := block(state))
    got = run("angular", model)
    for n in range(1, L + 1):
        for l in range(L):
            if l + n <= L:
                want = (F.cosine_similarity(z[l], z[l + n], dim=-1).acos() / math.pi).mean().item()
                assert got["distance"][n - 1][l] == pytest.approx(want, abs=1e-9)
            else:
                assert got["distance"][n - 1][l] is None
    assert got["profile"][L - 1] == got["distance"][L - 1][0]
    model.hidden = lambda state, l: z[0][:1] * (-1) ** l # itself: 0, its negative: 1
    assert np.allclose(run("angular", model)["profile"], [1, 0, 1, 0], atol=1e-7)

@pytest.mark.parametrize("name", ["preln", "sandwich", "lns"])
def test_causal_score_of_a_silent_block(name):
    model = make(name)
    model.h[1].attn.wo.weight.zero_(), model.h[1].mlp.w2.weight.zero_()
    scores = np.array(run("causal", model)["scores"], float)
    assert np.nanmax(np.abs(scores[1])) == 0 and scores[0, 2:].min() > 1e-3 and np.isnan(scores[lower(L)]).all()

@pytest.mark.parametrize("name", NAMES)
def test_causal_literally(name):
    model, s = make(name), 1
    def updates():
        z = [model.hidden(state, l) for l, state in analyze.states(model, X)]
        return [b - a for a, b in zip(z, z[1:])]
    clean = updates()
    with analyze.replaced(analyze.family(model)["skip"](model, s)):
        after = updates()
    got = run("causal", model)
    for l in range(s + 1, L):
        want = ((after[l] - clean[l]).norm(dim=-1) / clean[l].norm(dim=-1)).mean().item()
        assert got["scores"][s][l] == pytest.approx(want, rel=1e-5) # rows are kept in FP32
    late = [v for row in got["scores"][1:] for v in row if v is not None] # ceil(L/4) = 1
    assert len(late) == 3 and got["fraction"] == pytest.approx(sum(v > 0.45 for v in late) / 3)
    assert got["fractions"][45] == pytest.approx(got["fraction"]) and got["fractions"][0] == 1

@pytest.mark.parametrize("name", NAMES)
def test_permutation_is_the_naive_one(name):
    # shared prefixes give what L² full passes give
    model = make(name)
    got, clean = run("permutation", model), model(X, Y)[1]
    assert got["loss"] == pytest.approx(clean.item(), rel=1e-6)
    for i, j in PAIRS:
        analyze.swap(model, i, j)
        assert got["scores"][i][j] == pytest.approx(abs(model(X, Y)[1] - clean).item() / clean.item(), abs=1e-6)
        analyze.swap(model, i, j)

@pytest.mark.parametrize("name", ["preln", "hc"])
def test_permutation_of_equal_blocks(name):
    model = make(name)
    for k, p in model.h[1].named_parameters():
        dict(model.h[3].named_parameters())[k].data = p.data.clone()
    scores = run("permutation", model)["scores"]
    assert scores[1][3] == 0 and scores[1][2] > 1e-4 and scores[0][3] > 1e-4

def test_permutation_shares_prefixes():
    model, calls = make("preln", n_layer=6), []
    for block in model.h:
        block.register_forward_hook(lambda *_: calls.append(1))
    run("permutation", model, DATA[:1])
    assert len(calls) == 6 + sum(6 - i for i in range(6) for j in range(i + 1, 6)) # not 6 * 15

@pytest.mark.parametrize("name", NAMES)
def test_prune(name):
    model = make(name)
    got, clean = run("prune", model), model(X, Y)[1].item()
    for l in range(L):
        with analyze.replaced(analyze.family(model)["skip"](model, l)):
            loss = model(X, Y)[1].item()
        assert got["loss_change"][l] == pytest.approx(loss - clean, abs=1e-9)
        assert got["perplexity_change"][l] == pytest.approx(math.exp(loss) - math.exp(clean), rel=1e-6)

@pytest.mark.parametrize("name", NAMES)
def test_lens(name):
    model = make(name)
    kl = run("lens", model)["kl"]
    assert abs(kl[L]) < 1e-12 and min(kl[:L]) > 1e-4
    final, probe = model(X)[0].log_softmax(-1), model.head(model.wte(X))[0].log_softmax(-1) # z_0 is the embedding, or copies of it
    assert kl[0] == pytest.approx((final.exp() * (final - probe)).sum(-1).mean().item(), rel=1e-4) # HC's sum is 4 of them: eps

def test_prune_accuracy(tmp_path):
    import evaluate
    model = make("preln", vocab_size=320)
    rows = [dict(prompt=f"{a} is", choices=["this", "that", "it"], answer=i % 3) for i, a in enumerate("abcdefgh")]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    got = run("prune", model, task=str(tmp_path / "task.jsonl"))
    without = copy.deepcopy(model)
    del without.h[2]
    want = [evaluate.score(m, evaluate.get_tokenizer("bytes"), evaluate.read_task(str(tmp_path / "task.jsonl")))["acc"] for m in (model, without)]
    assert got["accuracy"][L] == want[0] and got["accuracy_change"][2] == pytest.approx(want[1] - want[0])

def test_lens_states():
    model = make("attnres_block", source_block=4) # blocks 1 and 3 begin inside a source: hidden is the running sum, the lens reads the mix
    state = model.h[0](model.begin(model.wte(X)))
    p = model.h[1].res_attn(state)
    torch.testing.assert_close(analyze.family(model)["lens"](model, state, 1), sum(a.unsqueeze(-1) * v for a, (v, _) in zip(p, state)))
    torch.testing.assert_close(model.hidden(state, 1), state[-1][0])
    model = make("hc")
    state = model.h[0](model.begin(model.wte(X)))
    torch.testing.assert_close(analyze.family(model)["lens"](model, state, 1), model.hidden(state, 1).view(B, T, 4, 16).sum(2))

# -----------------------------------------------------------------------------
# Paths, transport, block_mix, gates

def jacobian(model):
    # d(pre-norm input of sub-layer k) / d(output of sub-layer i): the other outputs and all coefficients held; channel 3, mean over tokens
    subs = [(b.norm_attn, b.attn) for b in model.h] + [(b.norm_mlp, b.mlp) for b in model.h]
    subs = [subs[i] for l in range(L) for i in (l, l + L)]
    found, outputs, reads = analyze.returned(model, X), [], []
    hooks = [m.register_forward_hook(lambda m, a, out: outputs.append(out)) for _, m in subs]
    model.trunk(X)
    [h.remove() for h in hooks]
    with torch.enable_grad():
        leaves = [v.detach().clone().requires_grad_() for v in (model.wte(X), *outputs)]
        forwards = {m: lambda *a, out=out: out for m, out in found.items()}
        forwards |= {branch: lambda h, v=v: v for (_, branch), v in zip(subs, leaves[1:])}
        hooks = [norm.register_forward_pre_hook(lambda m, a: reads.append(a[0])) for norm, _ in subs]
        with analyze.replaced(forwards):
            state = model.begin(leaves[0])
            for block in model.h:
                state = block(state)
            reads.append(model.readout(state))
        [h.remove() for h in hooks]
        grads = [torch.autograd.grad(r[..., 3].sum(), leaves, allow_unused=True, retain_graph=True) for r in reads]
    return np.array([[0.0 if g is None else g[..., 3].mean().item() for g in row] for row in grads])

@pytest.mark.parametrize("name", ["preln", "lns", "hc", "hc_static", "mhc", "mhc_lite", "mgr", "mgr_independent", "attnres", "attnres_block"])
def test_paths_are_the_jacobian(name):
    model = make(name)
    got = np.array(run("paths", model)["weights"], float)
    assert np.abs(got - jacobian(model))[lower(2 * L + 1)].max() < 1e-10
    assert np.isnan(got[~lower(2 * L + 1)]).all()
    if name in ("preln", "lns"):
        assert (got[lower(2 * L + 1)] == 1).all()
    if name in ("attnres", "mgr"):
        assert np.allclose(np.nansum(got, axis=1)[:1 if name == "mgr" else None], 1)

def test_paths_literally():
    # HC, token by token: beta_i^T A_{i+1} ... A_{k-1} alpha_k
    model = make("hc")
    c, n = list(analyze.returned(model, X).values()), 4 # read, mix, write of each sub-layer
    got = run("paths", model)["weights"]
    for i, k in ((0, 1), (0, 7), (2, 5)):
        w = c[i][2].unsqueeze(-1) # (B, T, N, 1)
        for m in range(i + 1, k):
            w = c[m][1] @ w
        w = (c[k][0].unsqueeze(-2) @ w).mean().item()
        assert got[k][i + 1] == pytest.approx(w, rel=1e-10)

def test_paths_twin():
    # a model that writes half of what its sub-layers return has weights 1/2, not 1
    model = make("preln")
    for block in model.h:
        block.forward = lambda x, b=block: (lambda h: h + 0.5 * b.mlp(b.norm_mlp(h)))(x + b.attn(b.norm_attn(x)))
    got = np.array(run("paths", model)["weights"], float)
    assert got[L, 2] == 0.5 and got[L, 1] == 1

@pytest.mark.parametrize("name", ["postln", "deepnorm", "keel", "sandwich", "layerrope", "moda", "moda_postln"])
def test_paths_where_there_are_none(name):
    model = make(name)
    before = model.trunk(X)
    with pytest.raises(analyze.Unfit):
        run("paths", model)
    assert torch.equal(model.trunk(X), before)

@pytest.mark.parametrize("name", ["hc", "mhc", "mhc_lite"])
def test_transport_is_the_product(name):
    model = make(name)
    maps = [c[1] for c in analyze.returned(model, X).values()] # (B, T, N, N), row: the stream written
    P = torch.eye(4, dtype=torch.float64).expand(B, T, 4, 4)
    for m in maps:
        P = m @ P
    torch.testing.assert_close(analyze.products(model, X)[:, :, -1], P)
    s = torch.linalg.svdvals(P)
    p = s / s.sum(-1, keepdim=True)
    got = run("transport", model)
    assert got["effective_rank"][L] == pytest.approx((-(p * p.log()).sum(-1)).exp().mean().item(), rel=1e-9)
    cos = torch.stack([F.cosine_similarity(P[..., i], P[..., j], dim=-1).abs() for i in range(4) for j in range(i)]).mean().item()
    assert got["cosine"][L] == pytest.approx(cos, rel=1e-9)
    assert got["effective_rank"][0] == pytest.approx(4) and got["cosine"][0] == pytest.approx(0)
    assert got["singular_values"][0] == pytest.approx(1)
    low, high = np.array(got["effective_rank_error"]) # two windows: the interval reaches at most from one to the other
    assert (low >= -1e-9).all() and (high >= -1e-9).all() and (high + low)[L] > 0

def test_transport_at_init():
    P = analyze.products(make("mhc", randomise=False), X)[:, :, 1:] # after 1 .. L blocks
    assert P.min() > 0 and (P.sum(-1) - 1).abs().max() < 1e-4 and (P.sum(-2) - 1).abs().max() < 1e-4
    P = analyze.products(make("hc"), X) # the twin
    assert (P.sum(-1) - 1).abs().max() > 1e-2
    for name in ("preln", "mgr", "attnres"):
        with pytest.raises(analyze.Unfit):
            run("transport", make(name))

def test_block_mix():
    model, got = make("attnres_block", source_block=3), None
    got = run("block_mix", model)["running_sum"]
    p = list(analyze.returned(model, X).values())
    for k in range(1, 2 * L + 1): # reader k, after sub-layers 0 .. k-1: is the newest source still open
        want = None if k % 3 == 0 and k < 2 * L else p[k - 1][-1].mean().item()
        assert got[k - 1] is None if want is None else got[k - 1] == pytest.approx(want)
    for name in ("attnres", "preln", "hc"):
        with pytest.raises(analyze.Unfit):
            run("block_mix", make(name))

@pytest.mark.parametrize("name, beta", [("mgr", 0.0474), ("mgr_independent", 0.0553)])
def test_gates(name, beta):
    model = make(name, n_layer=12, randomise=False)
    got = run("gates", model)
    assert len(got["largest"]) == 21 and np.allclose(got["largest"], beta, atol=1e-4) and np.allclose(got["mean"], beta, atol=1e-4)
    assert np.allclose(got["below_tenth"], 1) and np.array(got["distribution"])[int(beta * 100)].min() > 0.99
    model = make(name)
    beta = analyze.returned(model, X)[model.h[3].mgr_mlp][1]
    got = run("gates", model)
    assert got["mean"][2][-1] == pytest.approx(beta[..., 2].mean().item()) and got["largest"][-1] == pytest.approx(beta.max().item())
    assert np.allclose(np.sum(got["distribution"], axis=0), 1)
    with pytest.raises(analyze.Unfit):
        run("gates", make("moda"))

# -----------------------------------------------------------------------------
# Activations, gradients, weights, cost

@pytest.mark.parametrize("name", ["hc", "mhc", "mgr"])
def test_streams(name):
    # literally: the streams of the state after l blocks, one by one
    model = make(name)
    settle = train.sys.modules[type(model).__module__].settle
    X_l = [settle(*state) for _, state in analyze.states(model, X)][:L + (name == "mgr")] # (B, T, S, C); HC reads no streams at the end
    got = run("streams", model)
    assert np.shape(got["largest"]) == (4, 2 * L + (name == "mgr"))
    for i in range(4):
        for l in range(len(X_l)):
            if X_l[l].size(2) <= i: # not appended yet
                assert got["largest"][i][2 * l] is None and got["distance"][i][0][l] is None
                continue
            assert got["largest"][i][2 * l] == pytest.approx(X_l[l][:, :, i].abs().max().item())
            for n in range(1, len(X_l) - l):
                want = (F.cosine_similarity(X_l[l][:, :, i], X_l[l + n][:, :, i], dim=-1).clamp(-1, 1).acos() / math.pi).mean().item()
                assert got["distance"][i][n - 1][l] == pytest.approx(want, abs=1e-6)
    for name in ("preln", "attnres", "moda"):
        with pytest.raises(analyze.Unfit):
            run("streams", make(name))

@pytest.mark.parametrize("name", ["preln", "hc", "moda"])
def test_activations(name):
    model = make(name)
    z = [model.hidden(state, l) for l, state in analyze.states(model, X)]
    got = {**run("variance", model), **run("massive", model)}
    assert np.allclose(got["variance"], [np.mean([w[1:].var(correction=0).item() for w in v]) for v in z]) # by window
    assert np.allclose(got["norm"], [v.norm(dim=-1).mean().item() for v in z])
    for i in range(3):
        assert np.allclose(got["largest_hidden"][i], [v.abs().flatten().sort(descending=True).values[i].item() for v in z])
    out = analyze.returned(model, X, r"mlp$")[model.h[2].mlp]
    out = (out[0] if isinstance(out, tuple) else out).abs().flatten().sort(descending=True).values
    assert np.allclose([v[2] for v in got["largest_mlp"]], out[:3]) and len(got["largest_attn"][0]) == L

def test_grads():
    model = make("preln")
    got = run("grads", model)["gradient"]
    with torch.enable_grad():
        model.zero_grad()
        model(X, Y)[1].backward()
    assert got["mlp"][2] == pytest.approx(torch.cat([p.grad.flatten() for p in model.h[2].mlp.parameters()]).norm().item())
    assert got["block"][1] == pytest.approx(torch.cat([p.grad.flatten() for p in model.h[1].parameters()]).norm().item())

def test_schedule():
    model = make("layerrope", randomise=False)
    got = run("schedule", model)
    want = np.arange(1, L + 1) ** -0.5
    for site in ("attn_in", "mlp_in", "attn_out", "mlp_out"):
        assert np.allclose(got["multiplier"][site], want) and np.allclose(got["rotation"][site], np.degrees(want)) and got["slope"][site] == -0.5
    model = make("layerrope") # the multiplier is the size of the gain that the block really forms
    block = model.h[2]
    gain = model.depth["mlp_out"](block.row, block.log_depth)
    assert run("schedule", model)["multiplier"]["mlp_out"][2] == pytest.approx((gain.norm() / model.depth["mlp_out"].gamma.norm()).item(), rel=1e-5)

def test_norms(tmp_path):
    # vectors on an arc of 90 degrees round a centre, in 50 dimensions: two dimensions explain all of it
    angle = torch.linspace(0, math.pi / 2, 5)
    plane = torch.linalg.qr(torch.randn(50, 2, generator=torch.Generator().manual_seed(0))).Q
    full = torch.linspace(0, 2 * math.pi, 9)[:-1]
    ring = 3 + torch.stack((full.cos(), full.sin()), dim=1) @ plane.T
    head, raw = {}, b""
    for l, v in enumerate(ring.bfloat16()):
        raw += v.view(torch.int16).numpy().tobytes()
        head[f"model.layers.{l}.norm.weight"] = dict(dtype="BF16", shape=[50], data_offsets=[len(raw) - 100, len(raw)])
    head["__metadata__"] = {"format": "pt"}
    head = json.dumps(head).encode()
    path = tmp_path / "some.safetensors"
    path.write_bytes(struct.pack("<Q", len(head)) + head + raw)
    pattern = r"layers\.\d+\.norm\.weight"
    got = json.loads(analyze.as_json(analyze.norms(analyze.read_tensors(path, pattern), [], SimpleNamespace(pattern=pattern, dims=[7, 9]))))
    site = "model.layers.*.norm.weight"
    assert got["explained"][site] > 0.99 and got["arc"][site] == pytest.approx(315, abs=2)
    assert np.allclose(np.abs(np.diff(got["angle"][site])), 45, atol=2) and got["mean"][site][3] == pytest.approx(ring[3].mean().item(), abs=0.01)
    keel = run("norms", dict(make("keel").state_dict()))
    assert keel["mean"]["h.*.norm_attn_out.weight"][0] is None and len(keel["angle"]["h.*.norm_attn_out.weight"]) == L
    assert np.shape(got["dimensions"][site]) == (2, 8) and got["dimensions"][site][1][3] == pytest.approx(ring[3, 8].item(), abs=0.02)
    with pytest.raises(analyze.Unfit):
        run("norms", dict(make("layerrope").state_dict()))

def test_gains_in_effect():
    # what really multiplies a normed input of ones: LNS's factor, LayerRoPE's depth, Sandwich's own gain
    lns, sandwich, depth = (run("norms", analyze.gains(make(name))) for name in ("lns", "sandwich", "layerrope"))
    gain = lambda model, l: model.h[l].norm_mlp.weight * getattr(model.h[l], "scale", 1.0)
    for got, model in ((lns, make("lns")), (sandwich, make("sandwich"))):
        assert got["ratio"]["h.*.norm_mlp.weight"][3] == pytest.approx((gain(model, 3).norm() / gain(model, 0).norm()).item(), rel=1e-6)
        assert got["dimensions"]["h.*.norm_mlp.weight"][2][3] == pytest.approx(gain(model, 3)[2].item(), rel=1e-6)
    model = make("layerrope")
    assert np.allclose(depth["ratio"]["h.*.norm_attn_out.weight"], np.arange(1, L + 1) ** model.depth["attn_out"].beta.item())

def test_cost():
    model = make("preln")
    got = run("cost", model)
    assert got["flops"] == [model.flops(8) - 2 * 7 * 16 * V] and got["kv_bytes"] == [2 * L * 2 * 8 * 8 * 4]
    assert got["peak_bytes"][0] > 8 * model.num_params() // 2 and got["seconds"][0] > 0

# -----------------------------------------------------------------------------
# From the command line: checkpoints, run directories

def checkpoint(path, name, **fields):
    model = make(name, **fields)
    path.mkdir(parents=True)
    config = dict(vars(model.config), model=name, data=str(path.parent / "data"))
    torch.save(dict(model=model.float().state_dict(), config=config, step=1), path / "ckpt.pt")
    return path

@pytest.fixture(scope="module")
def ckpts(tmp_path_factory):
    root = tmp_path_factory.mktemp("ckpts")
    (root / "data").mkdir()
    for split in ("train", "val"):
        head = np.zeros(256, "<i4")
        head[:3] = 20240520, 1, 200
        (root / "data" / f"{split}_000000.bin").write_bytes(head.tobytes() + np.random.default_rng(0).integers(0, V, 200).astype("<u2").tobytes())
    with torch.no_grad():
        return root, [str(checkpoint(root / n, n, **fields)) for n, fields in dict(preln={}, hc={}, attnres_block=dict(source_block=3), mgr={}, layerrope={}).items()]

def test_all(ckpts, capsys):
    # every measure of one checkpoint, and those that it does not allow of one that does
    root, paths = ckpts
    flags = ["--out_dir", str(root / "out"), "--samples", "3", "--batch", "2", "--seq_len", "8"]
    assert analyze.main(["all", paths[1], *flags]) == 0
    assert all(analyze.main([name, path, *flags]) == 0 for name, path in zip(("block_mix", "gates", "schedule"), paths[2:]))
    for name, (_, windows) in analyze.MEASURES.items():
        if windows is None:
            continue
        assert (root / "out" / f"{name}.png").stat().st_size > 5000
        got = json.loads((root / "out" / f"{name}.json").read_text(), parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
        assert got["measure"] == name and got["settings"]["seq_len"] == 8
        assert all(k in r for r in got["runs"] for _, k, *_ in FIGURES[name][1] if k != "accuracy_change")
        assert not windows or all(r["samples"] == 3 for r in got["runs"])

def test_figure(tmp_path):
    # what a reader sees: titles, labels, one scale for all maps, bars, crosses, one legend entry for each line
    panels = [("map", "m", "score", "x of map", "y of map", (0, 1)), ("line logy by part", "v", "name", "x of line", "y of line", 2),
              ("line logx flip", "u", "", "d/L", "loss", "at")]
    runs = [dict(model=m, label=f"{m} {i}", m=[[0, s], [None, 2 * s]], v=[[1, 2], [3, 4]], u=[5, 6], u_error=[1, 1], at=[4, 8], lost=[16])
            for i, (m, s) in enumerate((("preln", 1), ("mine", 2), ("preln", 3)))]
    fig = draw("whole", panels, runs)
    fig.draw_without_rendering()
    axes = {ax.get_xlabel(): ax for ax in fig.axes}
    assert fig.get_suptitle() == "whole" and {ax.get_title() for ax in fig.axes} >= {"preln 0", "mine 1", "preln 2", "name"}
    scales = {(im.norm.vmin, im.norm.vmax) for ax in fig.axes for im in ax.images}
    assert len(scales) == 1 and min(scales)[0] == 0 and 5 < min(scales)[1] <= 6 and axes["x of map"].images[0].get_extent() == [-0.5, 1.5, 0.5, 2.5]
    lines = [line for line in axes["x of line"].lines if len(line.get_xdata()) == 2 and line.get_linestyle() != "None"]
    assert [list(line.get_xdata()) for line in lines] == [[2, 3]] * 6 and axes["x of line"].get_yscale() == "log"
    style = lambda line: (line.get_color(), line.get_linestyle(), line.get_marker())
    assert len({style(line) for line in lines}) == 5 # two parts of three runs; the second part of the first preln shares the dash of the second's first
    assert {t.get_text() for t in fig.legends[0].get_texts()} >= {f"{r['label']} part {i}" for r in runs for i in (1, 2)} | {r["label"] for r in runs}
    crosses = [line for line in axes["d/L"].lines if line.get_marker() == "x"]
    assert len(crosses) == 3 and list(crosses[0].get_xdata()) == [16] and axes["d/L"].xaxis_inverted()

def test_wrong_kind(ckpts, capsys):
    root, paths = ckpts
    for measure in ("gates", "schedule", "transport", "block_mix"):
        assert analyze.main([measure, paths[0], "--out_dir", str(root / "none"), "--samples", "2", "--seq_len", "8"]) == 1
        error = capsys.readouterr().err.strip().splitlines()
        assert error[-1].startswith(f"error: {measure}: preln (preln): it has no")
    for argv, code in ((["nothing", "x"], 2), (["lens", str(root / "absent")], 1), (["lens", paths[0], "--batch", "0"], 1), (["lens", paths[0], "--sampels", "2"], 2)):
        with pytest.raises(SystemExit) as e:
            analyze.main(argv)
        assert e.value.code == code and len(capsys.readouterr().err.strip().splitlines()) == 1

def write_run(root, name, loss, status="finished", log=None, **config):
    config = dict(dict(model="preln", n_layer=4, n_embd=64, learning_rate=1e-3, seed=0, vocab_size=320, data="data/stdlib"), **config)
    path = root / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    rows = [json.dumps(dict(step=1, loss=5.0, tokens=100)), json.dumps(dict(step=2, val_loss=4.0, tokens=200))]
    (path / "log.jsonl").write_bytes("\n".join(rows).encode() if log is None else log)
    if status != "incomplete":
        (path / "result.json").write_text(json.dumps(dict(status=status, val_loss=loss, tokens=200, seconds=1.5, n_params=1000, n_params_depth=7)))
    return str(path)

def test_table_of_imperfect_runs(tmp_path, capsys):
    runs = [write_run(tmp_path, "a1", 2.0, seed=1), write_run(tmp_path, "a2", 2.2, seed=2), write_run(tmp_path, "a3", 2.5, learning_rate=2e-3),
            write_run(tmp_path, "a4", math.nan, learning_rate=4e-3), # finished with nan
            write_run(tmp_path, "a5", 1.0, learning_rate=8e-3, seed=1), write_run(tmp_path, "a6", None, "diverged", learning_rate=8e-3, seed=2), # one seed lost
            write_run(tmp_path, "b1", None, "diverged", model="deepnorm"),
            write_run(tmp_path, "c1", 0, "incomplete", model="keel", log=b'{"step": 3, "loss": NaN, "tokens": 1.2e+03}\r\nwarning: x\r\n{"step": 4, "val_loss": -Infinity, "tokens": 1e05}\r\n{"step": 5, "lo'),
            write_run(tmp_path, "d1", 0, "incomplete", model="hc", n_streams=4, log=b""),
            write_run(tmp_path, "e1", 3.0, model="hc", n_layer=8, n_embd=48, n_streams=4, log=b'{"step": 1, "val_loss": 3.0, "tokens": 5}\n'),
            write_run(tmp_path, "f1", 2.9, model="hc", n_layer=8, n_embd=48, n_streams=2), write_run(tmp_path, "g1", 3.1, model="mine"), str(tmp_path / "absent")]
    (tmp_path / "empty").mkdir()
    assert analyze.main(["table", *runs, str(tmp_path / "empty"), "--csv", str(tmp_path / "t.csv")]) == 0
    text = capsys.readouterr().out
    assert "missing: absent" in text and "missing: empty" in text
    preln = next(line for line in text.splitlines() if line.startswith("| preln | 4 |"))
    assert "| 0.001 | 2.1000 ± 0.1414 (n 2) |" in preln and "0.004: diverged" in preln and "0.008: diverged" in preln and "| 1,000 | 7 | 200 |" in preln
    assert "| deepnorm | diverged |" in text and "| keel | incomplete at step 4 |" in text and "| hc n_streams=4 | incomplete at step 0 | 3.0000 |" in text
    assert "| hc n_streams=4 | 8 | 48 |" in text and "| hc n_streams=2 | 8 | 48 |" in text # two settings are two experiments, and say so
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert len(lines) == 15 and lines[0].startswith("model,n_layer,n_embd,n_params,n_params_depth,learning_rate,seed,tokens,val_loss,seconds,status")
    for measure in ("curves", "shapes", "lr"):
        assert analyze.main([measure, *runs, "--out_dir", str(tmp_path / "out")]) == 0
        got = json.loads((tmp_path / "out" / f"{measure}.json").read_text(), parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
        assert (tmp_path / "out" / f"{measure}.png").stat().st_size > 5000 and got["runs"]

def test_run_with_fields_of_another_kind(tmp_path, capsys):
    runs = [write_run(tmp_path, "a", 2.0), write_run(tmp_path, "b", 2.0, model=7, n_layer="two", n_embd=[16], seed="0", learning_rate=None, status=3)]
    for measure in ("table", "curves", "shapes", "lr"): # as if they were missing
        assert analyze.main([measure, *runs, "--out_dir", str(tmp_path / "out")]) == 0
    assert "| ? | 0 | 0 |" in capsys.readouterr().out

def test_lr_sensitivity(tmp_path, capsys):
    # by hand: preln 3.0, 2.0, 4.0 at 1, 2, 4e-3; diverged at 8e-3; hc has 1, 2, 8e-3 only
    cap = math.log(320)
    runs = [write_run(tmp_path, f"p{i}", v, "finished" if v else "diverged", learning_rate=r * 1e-3) for i, (r, v) in enumerate(((1, 3.0), (2, 2.0), (4, 4.0), (8, None)))]
    runs += [write_run(tmp_path, f"h{i}", v, model="hc", learning_rate=r * 1e-3) for i, (r, v) in enumerate(((1, 2.5), (2, 1.5), (8, 9.0)))]
    assert analyze.main(["lr", *runs, "--out_dir", str(tmp_path / "out")]) == 0
    preln, hc = json.loads((tmp_path / "out" / "lr.json").read_text())["runs"]
    assert preln["shared"] == hc["shared"] == [1e-3, 2e-3, 8e-3]
    assert preln["sensitivity"] == pytest.approx((1 + 0 + cap - 2) / 3)
    assert hc["sensitivity"] == pytest.approx((1 + 0 + cap - 1.5) / 3) # a loss above uniform counts as uniform
    assert preln["stable"] == 2e-3 and preln["lost"] == [8e-3] and preln["best"] == 2e-3 and hc["stable"] == 2e-3
    assert analyze.main(["lr", *runs[:5], "--out_dir", str(tmp_path / "out")]) == 0 # hc at one rate only: no sensitivity, and preln's is over its own four
    preln, hc = json.loads((tmp_path / "out" / "lr.json").read_text())["runs"]
    assert hc["sensitivity"] is None and preln["sensitivity"] == pytest.approx((1 + 0 + 2 + cap - 2) / 4)
    assert f"| preln | L4 d64 | 0.002 | 2.0000 | 0.002 | {preln['sensitivity']:.4f} | 0.001 0.002 0.004 0.008 |" in capsys.readouterr().out
