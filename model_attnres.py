"""
Attention Residuals: no residual stream; every sub-layer reads a softmax over the outputs of all earlier ones.

    s_i = w . N_g(v_i),  p = softmax_i(s)            v_0 embedding, v_{k+1} = F_k(h_k), each (B, T, C)
    h_k = N(sum_i p_i v_i)                           w, g (C): own query and key gain of consumer k
    logits = W N(sum_i p_i v_i)                      one more query; sub-layer 0 reads N(v_0) and has none

Full: every v_i is a source. Block: a source is the sum of `source_block` successive v_i, the newest still growing.
Read model_preln.py first, then `diff model_preln.py model_attnres.py`.
Attention Residuals (Kimi Team, 2026), arXiv:2603.15031.
"""
import functools
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

VARIANTS = {"attnres": {"learning_rate": 2e-3}, "attnres_block": {"source_block": 0, "learning_rate": 2e-3}} # command-line name -> config fields and train flags
GROWS = True # the state has one more entry after every block

# -----------------------------------------------------------------------------
# Building blocks (same text in every model file)

@dataclass
class GPTConfig:
    block_size: int = 2048 # longest sequence, in tokens
    vocab_size: int = 50304 # rows of the embedding and of the head
    n_layer: int = 24 # blocks: attention + MLP
    n_head: int = 16 # query heads
    n_kv_head: int = 0 # key and value heads, 0: as n_head
    n_embd: int = 1024 # width
    d_ff: int = 0 # hidden width of the MLP, 0: 8/3 of n_embd, rounded up to a multiple of 16
    rope_base: float = 10000.0 # base of the rotary frequencies
    norm_eps: float = 1e-6 # added to the mean square in RMSNorm
    source_block: int = 1 # sub-layers per source, 1: Full, 0: 2 * n_layer / 8, rounded up (1 where n_layer <= 4)

    def __post_init__(self):
        for name, least in dict(block_size=1, vocab_size=1, n_layer=1, n_head=1, n_embd=1, n_kv_head=0, d_ff=0, norm_eps=0).items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is below {least}")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.d_ff = self.d_ff or -(-8 * self.n_embd // 48) * 16
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd: {self.n_embd} is not divisible by n_head {self.n_head}")
        if self.n_embd // self.n_head % 2:
            raise ValueError(f"n_embd: {self.n_embd} / n_head {self.n_head} is a head of odd size, which cannot be rotated in pairs")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head: {self.n_kv_head} does not divide n_head {self.n_head}")
        if self.rope_base <= 1:
            raise ValueError(f"rope_base: {self.rope_base} is not above 1")

class RMSNorm(nn.Module):

    def __init__(self, ndim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.eps = eps

    def forward(self, x):
        y = x.to(torch.promote_types(x.dtype, torch.float32)) # statistics in FP32
        return F.rms_norm(y, self.weight.shape, self.weight, self.eps).to(x.dtype)

@functools.cache # one table for all blocks
def rotary_table(T, D, base):
    t, i = (torch.arange(0, n, s, dtype=torch.float32, device="cpu") for n, s in ((T, 1), (D, 2))) # (T), (D/2)
    angle = torch.outer(t, base ** (-i / D)) # (T, D/2)
    return angle.cos(), angle.sin()

class Rotary(nn.Module):

    def __init__(self, config):
        super().__init__()
        for name, table in zip(("cos", "sin"), rotary_table(config.block_size, config.n_embd // config.n_head, config.rope_base)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x):
        # x: (B, H, T, D), rotated in the pairs (i, i + D/2)
        a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1) # (B, H, T, D/2)
        cos, sin = self.cos[:x.size(2)], self.sin[:x.size(2)] # (T, D/2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype) # (B, H, T, D)

class CausalSelfAttention(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_size = config.n_head, config.n_kv_head, config.n_embd // config.n_head
        self.wqkv = nn.Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * self.head_size, bias=False) # rows q, k, v
        self.wo = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.rotary = Rotary(config)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.wqkv(x).view(B, T, -1, self.head_size).transpose(1, 2).split((self.n_head, self.n_kv_head, self.n_kv_head), dim=1) # (B, H, T, D)
        q, k = self.rotary(q), self.rotary(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.n_kv_head < self.n_head) # (B, H, T, D)
        return self.wo(y.transpose(1, 2).reshape(B, T, C)) # (B, T, C)

class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.w13 = nn.Linear(config.n_embd, 2 * config.d_ff, bias=False) # rows gate w1, up w3
        self.w2 = nn.Linear(config.d_ff, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.w13(x).chunk(2, dim=-1) # (B, T, d_ff)
        return self.w2(F.silu(gate) * up) # (B, T, C)

def lm_loss(x, w, targets):
    # x: (B, T, C) normed, w: (V, C), targets: (B, T), -1 ignored; mean over the others, in nats
    logits = F.linear(x, w) # (B, T, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

# -----------------------------------------------------------------------------
# The architecture (this is the part that differs)

def push(state, v, new):
    # v (B, T, C) opens a source, or joins the newest; state: S sources, each (v, mean square over C), never changed in place
    if not new and len(state) > 1: # nothing joins the embedding
        state, v = state[:-1], state[-1][0] + v # (B, T, C)
    return state + ((v, v.to(torch.promote_types(v.dtype, torch.float32)).square().mean(-1)),) # mean square (B, T)

def mix(state, res, norm=None):
    # what a consumer reads: the sources weighted by res, or the newest where there is no res; then the consumer's norm
    x = state[-1][0] # (B, T, C)
    if res is not None:
        x = sum(p * v for p, (v, _) in zip(res(state).unsqueeze(-1), state)).to(x.dtype) # (B, T, C), summed in FP32
    return x if norm is None else norm(x)

class DepthSoftmax(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(config.n_embd)) # zero init: starts as the mean of all sources
        self.g = nn.Parameter(torch.ones(config.n_embd))
        self.eps = config.norm_eps

    def forward(self, state):
        q = self.w * self.g # (C)
        s = torch.stack([(v * q).sum(-1) for v, _ in state]) # (S, B, T), no 1/sqrt(C)
        s = s * torch.rsqrt(torch.stack([ms for _, ms in state]) + self.eps) # (S, B, T)
        return s.softmax(dim=0) # (S, B, T)

class Block(nn.Module):

    def __init__(self, config, l):
        super().__init__()
        b = config.source_block or -(-config.n_layer // 4)
        self.new = 2 * l % b == 0, (2 * l + 1) % b == 0 # does the output of attention, of the MLP open a source
        self.res_attn = DepthSoftmax(config) if l > 0 else None
        self.norm_attn = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = CausalSelfAttention(config)
        self.res_mlp = DepthSoftmax(config)
        self.norm_mlp = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, state):
        state = push(state, self.attn(mix(state, self.res_attn, self.norm_attn)), self.new[0])
        return push(state, self.mlp(mix(state, self.res_mlp, self.norm_mlp)), self.new[1])

class GPT(nn.Module):
    NO_DECAY = () # endings of the parameter names that weight decay leaves alone
    MATRIX = ("attn.wqkv.weight", "attn.wo.weight", "mlp.w13.weight", "mlp.w2.weight") # what Muon may take

    def __init__(self, config):
        super().__init__()
        if config.source_block < 0:
            raise ValueError(f"source_block: {config.source_block} is negative")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, l) for l in range(config.n_layer))
        self.res_f = DepthSoftmax(config)
        self.norm_f = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._init_weights()

    def begin(self, x): # embedding -> state
        return push((), x, True)

    def readout(self, x): # state -> what the final norm reads
        return mix(x, self.res_f) # (B, T, C)

    def hidden(self, x, l): # state after l blocks -> the representation that analysis looks at
        res = self.res_f if l == self.config.n_layer else self.h[l].res_attn if self.h[l].new[0] else None
        return mix(x, res) # (B, T, C), the running sum inside a source

    def depth_flops(self, T): # what the architecture adds to flops(T)
        L, b = self.config.n_layer, self.config.source_block or -(-self.config.n_layer // 4)
        n = 1 if self.config.source_block == 1 else 2 # for Block the paper counts one too many where a source has just closed
        return 4 * T * self.config.n_embd * (sum(n + k // b for k in range(1, 2 * L)) + 1 - (-2 * L // b))

    def init_depth(self): # rescales or draws, after the shared draw
        pass

    # -------------------------------------------------------------------------
    # Everything below is the same text in every model file

    def embed(self, idx):
        x = self.wte(idx) # (B, T, C)
        if torch.is_autocast_enabled(x.device.type): # residual streams and depth sources live in the autocast dtype
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x

    def trunk(self, idx):
        state = self.begin(self.embed(idx))
        for block in self.h:
            state = block(state)
        return self.readout(state) # (B, T, C)

    def head(self, x, targets=None):
        x = self.norm_f(x) # (B, T, C)
        if targets is None:
            return self.lm_head(x), None # (B, T, V)
        return None, lm_loss(x, self.lm_head.weight, targets)

    def forward(self, idx, targets=None):
        # idx, targets: (B, T) int64 -> (logits (B, T, V), None), or (None, loss) where targets are given
        return self.head(self.trunk(idx), targets)

    def _init_weights(self):
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(m.weight, std=0.02, a=-0.06, b=0.06)
        self.init_depth()

    def param_groups(self):
        # every parameter exactly once, by the meaning that its name gives, never by its shape
        groups = dict(embed=[], head=[], matrix=[], other=[], no_decay=[])
        for name, p in self.named_parameters():
            key = ("embed" if name == "wte.weight" else "head" if name == "lm_head.weight" else "matrix" if name.endswith(self.MATRIX)
                   else "no_decay" if name.endswith(self.NO_DECAY) else "other")
            groups[key].append(p)
        return groups

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops(self, T):
        # forward FLOPs of one sequence of T tokens, logits at every position (DepthBench, Appendix D, extended to GQA)
        c = self.config
        d_kv = c.n_kv_head * c.n_embd // c.n_head
        block = 4 * T * c.n_embd**2 + 4 * T * c.n_embd * d_kv + 6 * T * c.n_embd * c.d_ff + 2 * T**2 * c.n_embd
        return c.n_layer * block + 2 * T * c.n_embd * c.vocab_size + self.depth_flops(T)
