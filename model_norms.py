"""
Five placements of the norm on one residual stream: Post-LN, Sandwich-LN (= Peri-LN), LNS, DeepNorm, KEEL.

    postln     h <- N(h + F(h))                         h (B, T, C), F attention or MLP, N RMSNorm
    sandwich   h <- h + N_out(F(N(h)))
    lns        h <- h + F(N(h) / sqrt(l + 1))           l = 0 .. L-1 counts blocks
    deepnorm   h <- LN(a h + F(h)), a = (2L)^(1/4)      LN centred, no bias; wo, w13, w2 and v of wqkv times (8L)^(-1/4) at init
    keel       h <- N_out(a h + F(N(h))), a = 2L        block 0: attention h <- h + F(N(h)), MLP with a = 1

Read model_preln.py first, then `diff model_preln.py model_norms.py`. Papers: arXiv:1706.03762 (Post-LN), 2105.13290 (Sandwich-LN),
2502.02732 (Peri-LN), 2502.05795 (LNS), 2203.00555 (DeepNorm), 2601.19895 (KEEL).
"""
import functools
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

VARIANTS = { # command-line name -> config fields and train flags
    "postln": {"norm": "postln", "learning_rate": 5e-4}, "sandwich": {"norm": "sandwich", "learning_rate": 2e-3}, # guess: a quarter of Pre-LN's for postln
    "lns": {"norm": "lns", "learning_rate": 1e-2}, "deepnorm": {"norm": "deepnorm", "learning_rate": 1e-3}, "keel": {"norm": "keel", "learning_rate": 2e-3}}

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
    norm: str = "postln" # where the norms are: postln, sandwich, lns, deepnorm or keel

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

def add(a, x, y):
    # a x + y in FP32: beside a x, BF16 would round much of y away
    return a * x.to(torch.promote_types(x.dtype, torch.float32)) + y # (B, T, C)

class PostLN(nn.Module):

    def __init__(self, config, l):
        super().__init__()
        self.norm_attn = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = CausalSelfAttention(config)
        self.norm_mlp = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x):
        x = self.norm_attn(x + self.attn(x)) # (B, T, C)
        x = self.norm_mlp(x + self.mlp(x)) # (B, T, C)
        return x

class Sandwich(nn.Module):

    def __init__(self, config, l):
        super().__init__()
        self.norm_attn = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = CausalSelfAttention(config)
        self.norm_attn_out = RMSNorm(config.n_embd, config.norm_eps)
        self.norm_mlp = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.norm_mlp_out = RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, x):
        x = x + self.norm_attn_out(self.attn(self.norm_attn(x))) # (B, T, C)
        x = x + self.norm_mlp_out(self.mlp(self.norm_mlp(x))) # (B, T, C)
        return x

class LNS(nn.Module):

    def __init__(self, config, l):
        super().__init__()
        self.norm_attn = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = CausalSelfAttention(config)
        self.norm_mlp = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.register_buffer("scale", torch.tensor([(l + 1) ** -0.5]), persistent=False) # (1), not (): BF16 times it is FP32

    def forward(self, x):
        x = x + self.attn(self.norm_attn(x) * self.scale) # (B, T, C)
        x = x + self.mlp(self.norm_mlp(x) * self.scale) # (B, T, C)
        return x

class DeepNorm(nn.Module):

    def __init__(self, config, l):
        super().__init__()
        self.norm_attn = nn.LayerNorm(config.n_embd, config.norm_eps, bias=False)
        self.attn = CausalSelfAttention(config)
        self.norm_mlp = nn.LayerNorm(config.n_embd, config.norm_eps, bias=False)
        self.mlp = MLP(config)
        self.alpha = (2 * config.n_layer) ** 0.25

    def forward(self, x):
        x = self.norm_attn(add(self.alpha, x, self.attn(x))).to(x.dtype) # (B, T, C)
        x = self.norm_mlp(add(self.alpha, x, self.mlp(x))).to(x.dtype) # (B, T, C)
        return x

class KEEL(nn.Module):

    def __init__(self, config, l):
        super().__init__()
        self.norm_attn = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = CausalSelfAttention(config)
        self.norm_attn_out = RMSNorm(config.n_embd, config.norm_eps) if l else nn.Identity()
        self.norm_mlp = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.norm_mlp_out = RMSNorm(config.n_embd, config.norm_eps)
        self.alpha = 2 * config.n_layer if l else 1 # of block 0 only the MLP has a norm after the sum

    def forward(self, x):
        x = self.norm_attn_out(add(self.alpha, x, self.attn(self.norm_attn(x)))).to(x.dtype) # (B, T, C)
        x = self.norm_mlp_out(add(self.alpha, x, self.mlp(self.norm_mlp(x)))).to(x.dtype) # (B, T, C)
        return x

BLOCKS = {"postln": PostLN, "sandwich": Sandwich, "lns": LNS, "deepnorm": DeepNorm, "keel": KEEL}

class GPT(nn.Module):
    NO_DECAY = () # endings of the parameter names that weight decay leaves alone
    MATRIX = ("attn.wqkv.weight", "attn.wo.weight", "mlp.w13.weight", "mlp.w2.weight") # what Muon may take

    def __init__(self, config):
        super().__init__()
        if config.norm not in BLOCKS:
            raise ValueError(f"norm: {config.norm} is not one of {', '.join(BLOCKS)}")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(BLOCKS[config.norm](config, l) for l in range(config.n_layer))
        self.norm_f = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._init_weights()

    def begin(self, x): # embedding -> state
        return x

    def readout(self, x): # state -> what the final norm reads
        return x # (B, T, C)

    def hidden(self, x, l): # state after l blocks -> the representation that analysis looks at
        return x # (B, T, C)

    def depth_flops(self, T): # what the architecture adds to flops(T)
        return 0

    def init_depth(self): # rescales or draws, after the shared draw
        for block in self.h if self.config.norm == "deepnorm" else ():
            v = block.attn.wqkv.weight[-block.attn.n_kv_head * block.attn.head_size:] # (n_kv_head * D, C), the last rows of q, k, v
            for w in (v, block.attn.wo.weight, block.mlp.w13.weight, block.mlp.w2.weight):
                w.data.mul_((8 * self.config.n_layer) ** -0.25) # beta

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
