"""Attention Residuals and MoDA against literal forms of their equations; every property with a broken twin that must fail it."""
import pytest
import torch
import torch.nn.functional as F

import train

PRELN, ATTNRES, MODA = (train.load_module(train.HERE / f"model_{name}.py") for name in ("preln", "attnres", "moda"))
TINY = dict(vocab_size=61, block_size=16, n_layer=3, n_head=2, n_embd=20)

def build(arch, seed=0, dtype=torch.float64, random=True, **fields):
    torch.manual_seed(seed)
    model = arch.GPT(arch.GPTConfig(**{**TINY, **fields})).to(dtype)
    if random: # what starts at zero or one would hide mistakes
        for p in model.parameters():
            p.data.add_(torch.randn_like(p) * (0.5 if p.ndim == 1 else 0.1))
    return model

def tokens(B=2, T=11, seed=1):
    return torch.randint(TINY["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))

def diff(a, b):
    return (a - b).abs().max().item()

# -----------------------------------------------------------------------------
# Attention Residuals

def attnres_literal(model, idx, b):
    # logits of the spec's schedule: frozen sums Q, running sum S, frozen before every b-th sub-layer
    eps = model.config.norm_eps
    def mix(res, sources):
        v = torch.stack(sources) # (S, B, T, C)
        key = v / (v.square().mean(-1, keepdim=True) + eps).sqrt() * res.g
        p = (key @ res.w).softmax(0) # (S, B, T)
        return (p.unsqueeze(-1) * v).sum(0)
    x = model.wte(idx)
    Q, S = [x], None
    for k in range(2 * len(model.h)):
        block = model.h[k // 2]
        res, norm, branch = (block.res_mlp, block.norm_mlp, block.mlp) if k % 2 else (block.res_attn, block.norm_attn, block.attn)
        if k > 0 and k % b == 0:
            Q, S = Q + [S], None
        v = branch(norm(x if k == 0 else mix(res, Q if S is None else Q + [S])))
        S = v if S is None else S + v
    return model.lm_head(model.norm_f(mix(model.res_f, Q + [S])))

@pytest.mark.parametrize("b", [0, 1, 2, 3, 4, 100])
def test_attnres_equals_the_literal_schedule(b):
    for L in (1, 3, 7) if b == 0 else (5,):
        model = build(ATTNRES, n_layer=L, source_block=b)
        assert diff(model(tokens())[0], attnres_literal(model, tokens(), b or -(-2 * L // 8))) < 1e-12

def keeps_residual(state, res, norm=None, mix=ATTNRES.mix):
    x = mix(state, res) + (state[-1][0] if res is not None else 0)
    return x if norm is None else norm(x)

def normalises_values(state, res, norm=None, mix=ATTNRES.mix):
    return mix(tuple((v * torch.rsqrt(ms + 1e-6).unsqueeze(-1), ms / ms) for v, ms in state), res, norm)

def divides_by_sqrt(self, state, forward=ATTNRES.DepthSoftmax.forward):
    s = forward(self, state).log() / self.w.numel() ** 0.5
    return s.softmax(0)

def forgets_the_key_gain(self, state, forward=ATTNRES.DepthSoftmax.forward):
    g, self.g.data = self.g.data, torch.ones_like(self.g)
    p, self.g.data = forward(self, state), g
    return p

def accumulates(state, v, new, push=ATTNRES.push):
    return push(state, v + state[-1][0] if state else v, new)

@pytest.mark.parametrize("where, name, twin", [
    (ATTNRES, "mix", keeps_residual), (ATTNRES, "mix", normalises_values), (ATTNRES, "push", accumulates),
    (ATTNRES.DepthSoftmax, "forward", divides_by_sqrt), (ATTNRES.DepthSoftmax, "forward", forgets_the_key_gain)])
def test_attnres_broken_twins_are_caught(monkeypatch, where, name, twin):
    model = build(ATTNRES)
    want = attnres_literal(model, tokens(), 1)
    monkeypatch.setattr(where, name, twin)
    assert diff(model(tokens())[0], want) > 1e-3

@pytest.mark.parametrize("b", [1, 0, 3, 100])
def test_attnres_at_zero_queries_is_preln(b):
    fields = dict(n_layer=9, n_embd=32)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        preln = build(PRELN, dtype=dtype, random=False, norm_eps=0, **fields)
        model = build(ATTNRES, dtype=dtype, random=False, norm_eps=0, source_block=b, **fields)
        assert diff(model(tokens())[0], preln(tokens())[0]) < tolerance
    model.h[4].res_mlp.w.data += 0.3 # a query that does not start at zero is seen
    assert diff(model(tokens())[0], preln(tokens())[0]) > 1e-3
    preln, model = (build(arch, random=False, **fields, **own) for arch, own in ((PRELN, {}), (ATTNRES, {"source_block": b})))
    gap = diff(model(tokens())[0], preln(tokens())[0]) # at the default eps the two differ: the mean of S sources is S times smaller than their sum
    print(f"source_block {b}, L 9, d 32, norm_eps 1e-6: max logit difference {gap:.1e}")
    assert 1e-5 < gap < 0.5

@pytest.mark.parametrize("L", [1, 2, 4, 12, 21, 42, 70])
def test_block_attnres_partition_and_source_counts(L):
    for b in (0, 1, 5) if L < 40 else (0,):
        model = build(ATTNRES, dtype=torch.float32, n_layer=L, n_embd=4, n_head=1, source_block=b, vocab_size=7)
        b, counts = b or -(-2 * L // 8), []
        for name, m in model.named_modules():
            if isinstance(m, ATTNRES.DepthSoftmax):
                m.register_forward_hook(lambda m, args, p: counts.append(p.size(0)))
        state = model.begin(model.embed(tokens(1, 3) % 7))
        with torch.no_grad():
            for block in model.h:
                state = block(state)
            model.readout(state)
        assert counts == [1 + k // b if k % b == 0 else 2 + k // b for k in range(1, 2 * L)] + [1 + -(-2 * L // b)]
        new = [opens for block in model.h for opens in block.new]
        groups = [sum(new[:k + 1]) for k in range(2 * L)] # the source that sub-layer k is part of, from 1
        assert groups == [1 + k // b for k in range(2 * L)] and len(state) == 1 + groups[-1] <= 1 + 2 * L

def test_block_attnres_is_full_up_to_four_blocks():
    for L in (1, 4):
        full, block = (build(ATTNRES, n_layer=L, source_block=b) for b in (1, 0))
        assert torch.equal(full(tokens())[0], block(tokens())[0])
    full, block = (build(ATTNRES, n_layer=5, source_block=b) for b in (1, 0))
    assert diff(full(tokens())[0], block(tokens())[0]) > 1e-3

def test_attnres_first_attention_has_no_query():
    names = dict(build(ATTNRES).named_parameters())
    assert "h.0.res_attn.w" not in names and {"h.0.res_mlp.w", "h.1.res_attn.g", "res_f.w", "res_f.g"} <= set(names)
    own = sum(p.numel() for n, p in names.items() if "res_" in n)
    assert own == 4 * TINY["n_layer"] * TINY["n_embd"]
    model = build(ATTNRES)
    model.h[0].res_attn = ATTNRES.DepthSoftmax(model.config).double() # the twin: one source, so its gradient is zero
    model(tokens(), tokens())[1].backward()
    assert model.h[0].res_attn.w.grad.abs().max() < 1e-12 < model.h[0].res_mlp.w.grad.abs().max()

def test_attnres_skipped_first_block_leaves_the_embedding_alone():
    model = build(ATTNRES, n_layer=8, source_block=4)
    state = model.begin(model.embed(tokens()))
    assert model.h[1](state)[0] is state[0] and len(model.h[1](state)) == 2

def test_attnres_hidden_is_what_the_next_consumer_reads():
    model = build(ATTNRES, n_layer=5, source_block=4)
    state = model.begin(model.embed(tokens()))
    for l, block in enumerate(model.h):
        if 2 * l % 4 == 0: # otherwise inside a source: the running sum
            seen = []
            handle = block.norm_attn.register_forward_hook(lambda m, args, y: seen.append(args[0]))
        before = tuple(state)
        want, state = model.hidden(state, l), block(state)
        assert all(a is b for a, b in zip(before[:-1], state)) # nothing is changed in place
        assert torch.equal(want, seen[-1] if 2 * l % 4 == 0 else before[-1][0])
        handle.remove()
    assert torch.equal(model.hidden(state, 5), model.readout(state))

# -----------------------------------------------------------------------------
# MoDA

def qkv_slots(S, B=2, H=4, Hkv=2, T=5, D=6, dtype=torch.float64):
    torch.manual_seed(S)
    r = lambda heads: torch.randn(B, heads, T, D, dtype=dtype, requires_grad=True)
    return r(H), r(Hkv), r(Hkv), tuple((r(Hkv), r(Hkv)) for _ in range(S))

def joint(q, k, v, slots):
    # token by token: one softmax over the keys of tokens 0..t and the slots of token t
    G, D = q.size(1) // k.size(1), q.size(3)
    y = torch.empty_like(q)
    for b in range(q.size(0)):
        for h in range(q.size(1)):
            for t in range(q.size(2)):
                keys = torch.stack([*k[b, h // G, :t + 1], *(s[0][b, h // G, t] for s in slots)])
                values = torch.stack([*v[b, h // G, :t + 1], *(s[1][b, h // G, t] for s in slots)])
                y[b, h, t] = (keys @ q[b, h, t] / D**0.5).softmax(0) @ values
    return y

def merged(q, k, v, slots):
    # sequence and depth apart, joined by their log-sum-exp
    G, T, D = q.size(1) // k.size(1), q.size(2), q.size(3)
    k, v = (x.repeat_interleave(G, dim=1) for x in (k, v))
    slots = [[x.repeat_interleave(G, dim=1) for x in s] for s in slots]
    s = (q @ k.mT / D**0.5).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    z = torch.stack([(q * a).sum(-1) / D**0.5 for a, _ in slots], -1)
    w = torch.sigmoid(s.logsumexp(-1) - z.logsumexp(-1)).unsqueeze(-1)
    depth = sum(p.unsqueeze(-1) * b for p, (_, b) in zip(z.softmax(-1).unbind(-1), slots))
    return w * (s.softmax(-1) @ v) + (1 - w) * depth

@pytest.mark.parametrize("S, Hkv, D", [(1, 2, 6), (2, 4, 10), (7, 1, 2), (5, 2, 38)])
def test_moda_one_softmax_over_sequence_and_depth(S, Hkv, D):
    q, k, v, slots = qkv_slots(S, Hkv=Hkv, D=D)
    y = MODA.depth_attention(q, k, v, slots)
    assert diff(y, joint(q, k, v, slots)) < 1e-12 and diff(y, merged(q, k, v, slots)) < 1e-12
    inputs = [q, k, v, *(x for s in slots for x in s)]
    dy = torch.randn_like(y)
    for got, want in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(joint(q, k, v, slots), inputs, dy)):
        assert diff(got, want) < 1e-12

def test_moda_broken_twins_are_caught():
    q, k, v, slots = qkv_slots(3)
    want = MODA.depth_attention(q, k, v, slots)
    wide = [[x.repeat_interleave(2, dim=1) for x in s] for s in slots]
    depth = torch.stack([(q * a).sum(-1) for a, _ in wide], -1).mul(6**-0.5).softmax(-1)
    two = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) + sum(depth[..., j, None] * wide[j][1] for j in range(3))
    assert diff(two, want) > 1e-2 # two softmaxes, added
    assert diff(joint(q, k, v, slots + ((k, v),)), want) > 1e-2 # the block's own pair once more
    assert diff(joint(q, k, v, [(a.roll(1, 2), b.roll(1, 2)) for a, b in slots]), want) > 1e-2 # another token's slots
    assert diff(joint(q * 6**0.5, k, v, slots), want) > 1e-2 # no 1/sqrt(D)
    swapped = joint(q.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2), k, v, slots).unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2)
    assert diff(swapped, want) > 1e-2 # query heads shared out the other way

def test_moda_block_0_is_plain_attention():
    for own in ({}, {"n_kv_head": 1}):
        preln, moda = (build(arch, random=False, **own) for arch in (PRELN, MODA))
        x = torch.randn(2, 7, 20, dtype=torch.float64)
        assert torch.equal(moda.h[0].attn(x, ())[0], preln.h[0].attn(x))
        assert torch.equal(moda.h[0]((x, ()))[0], preln.h[0](x))
        assert diff(moda(tokens())[0], preln(tokens())[0]) > 1e-4 # later blocks do see the slots

@pytest.mark.parametrize("name", ["pre", "post"])
def test_moda_slots(name):
    model = build(MODA, norm=name, n_layer=4, n_kv_head=1)
    seen, state = [], model.begin(model.embed(tokens()))
    for l, block in enumerate(model.h):
        assert len(state[1]) == 2 * l # off by one would be seen here
        reads = []
        handles = [block.mlp.register_forward_hook(lambda m, args, y: reads.append(args[0])),
                   block.attn.register_forward_hook(lambda m, args, y: reads.append((args[0], y[1])))]
        before, state = state, block(state)
        [h.remove() for h in handles]
        assert all(a is b for a, b in zip(before[1], state[1])) # nothing is changed in place
        if l == 3:
            assert block.kv_mlp is None and state[1] is before[1]
            break
        (x, (k, v)), y = reads
        want = (x @ block.attn.wqkv.weight[20:].T).unflatten(-1, (2, 10)).transpose(1, 2) # rows k, v of one head, before RoPE
        assert diff(torch.cat((k, v), 1), want) < 1e-12 and state[1][2 * l] == (k, v)
        want = (y @ block.kv_mlp.weight.T).unflatten(-1, (2, 10)).transpose(1, 2)
        assert diff(torch.cat(state[1][2 * l + 1], 1), want) < 1e-12
    assert torch.equal(model.readout(state), state[0])

def test_moda_rotated_depth_keys_are_position_free():
    model = build(MODA, rope_on_depth_k=True)
    rotary = model.h[0].attn.rotary
    q, (k, _) = torch.randn(2, 2, 11, 10, dtype=torch.float64), model.h[0].kv_mlp(torch.randn(2, 11, 20, dtype=torch.float64))
    bare = build(MODA).h[0].kv_mlp
    assert not isinstance(bare.rotary, MODA.Rotary) and isinstance(model.h[0].kv_mlp.rotary, MODA.Rotary)
    cos, sin = rotary.cos[:11], rotary.sin[:11] # rotate back: the same angles, sine negated
    a, b = k.chunk(2, -1)
    unrotated = torch.cat((a * cos + b * sin, b * cos - a * sin), -1)
    assert diff((rotary(q) * k).sum(-1), (q * unrotated).sum(-1)) < 1e-6 # cos and sin start as FP32
    assert diff(build(MODA)(tokens())[0], model(tokens())[0]) > 1e-4

@pytest.mark.parametrize("name", ["pre", "post"])
def test_moda_is_causal_through_the_slots(name, monkeypatch):
    model = build(MODA, norm=name, n_layer=4)
    a, b = tokens(), tokens()
    b[:, 6:] = (b[:, 6:] + 1) % 61
    leak = lambda: diff(model(a)[0][:, :6], model(b)[0][:, :6])
    assert leak() < 1e-12
    right = MODA.depth_attention
    monkeypatch.setattr(MODA, "depth_attention", lambda q, k, v, slots: right(q, k, v, tuple((k.roll(-1, 2), v.roll(-1, 2)) for k, v in slots)))
    assert leak() > 1e-4 # the next token's slots

def test_moda_gradients_flow_through_the_slots(monkeypatch):
    model = build(MODA, n_layer=4)
    def grads():
        model.zero_grad()
        model(tokens(), tokens(seed=2))[1].backward()
        return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    full = grads()
    assert all(g is not None and g.abs().max() > 1e-8 for g in full.values())
    right = MODA.depth_attention
    monkeypatch.setattr(MODA, "depth_attention", lambda q, k, v, slots: right(q, k, v, tuple((k.detach(), v.detach()) for k, v in slots)))
    cut = grads()
    assert cut["h.0.kv_mlp.weight"] is None and diff(cut["h.0.attn.wqkv.weight"], full["h.0.attn.wqkv.weight"]) > 1e-6

@pytest.mark.parametrize("arch, fields, message", [(ATTNRES, {"source_block": -1}, "source_block: -1"), (MODA, {"norm": "peri"}, "norm: peri")])
def test_bad_fields_are_named(arch, fields, message):
    with pytest.raises(ValueError, match=message):
        build(arch, **fields)
