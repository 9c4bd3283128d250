"""
Mixture-of-Depths Attention: a query also attends to keys and values of its own token in all earlier sub-layers.
Residuals and norms as Pre-LN (moda) or Post-LN (moda_postln).

    y_t = softmax(q_t . [k_1 .. k_t | k'_0 .. k'_{2l-1}] / sqrt(D)) [v_1 .. v_t | v'_0 .. v'_{2l-1}]     block l, token t, one softmax
    k'_{2i}, v'_{2i}     = the keys (before RoPE) and values of token t in the attention of block i
    k'_{2i+1}, v'_{2i+1} = U_i x                     x the input of MLP i, U_i (2 Hkv D, C), none in the last block

Read model_preln.py first, then `diff model_preln.py model_moda.py`.
Mixture-of-Depths Attention (Zhu et al., 2026), arXiv:2603.15619.
"""
import functools
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

VARIANTS = {"moda": {"learning_rate": 2e-3}, "moda_postln": {"norm": "post", "learning_rate": 1e-3}} # command-line name -> config fields and train flags
GROWS = True # the state has two more entries after every block

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
    norm: str = "pre" # pre: x + F(N(x)), post: N(x + F(x))
    rope_on_depth_k: bool = False # rotate the keys of other depths too (guess: the paper does not say)

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
        self.rope_on_depth_k = config.rope_on_depth_k

    def forward(self, x, slots):
        B, T, C = x.shape
        q, k, v = self.wqkv(x).view(B, T, -1, self.head_size).transpose(1, 2).split((self.n_head, self.n_kv_head, self.n_kv_head), dim=1) # (B, H, T, D)
        k_depth, q, k = k, self.rotary(q), self.rotary(k)
        y = depth_attention(q, k, v, slots) # (B, H, T, D)
        return self.wo(y.transpose(1, 2).reshape(B, T, C)), (k if self.rope_on_depth_k else k_depth, v) # (B, T, C)

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

def depth_attention(q, k, v, slots):
    # q: (B, H, T, D), k, v: (B, Hkv, T, D) causal; slots: S pairs k, v (B, Hkv, T, D), the same token at other depths
    if not slots:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.size(1) < q.size(1)) # (B, H, T, D)
    with torch.autocast(q.device.type, enabled=False):
        T, dtype = q.size(2), torch.promote_types(q.dtype, torch.float32)
        q = q.to(dtype).unflatten(1, (k.size(1), -1)) * q.size(3) ** -0.5 # (B, Hkv, G, T, D), G query heads share a key head
        future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1) # (T, T)
        s = (q @ k.to(dtype).unsqueeze(2).mT).masked_fill(future, -torch.inf) # (B, Hkv, G, T, T)
        s_depth = [(q * k.unsqueeze(2)).sum(-1, keepdim=True) for k, _ in slots] # S of (B, Hkv, G, T, 1)
        p, *p_depth = torch.cat((s, *s_depth), dim=-1).softmax(-1).split((T, *[1] * len(slots)), dim=-1) # one softmax
        y = p @ v.to(dtype).unsqueeze(2) + sum(p * v.unsqueeze(2) for p, (_, v) in zip(p_depth, slots)) # (B, Hkv, G, T, D)
        return y.flatten(1, 2).to(v.dtype) # (B, H, T, D)

class DepthKV(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.n_kv_head = config.n_kv_head
        self.weight = nn.Parameter(torch.empty(2 * config.n_kv_head * config.n_embd // config.n_head, config.n_embd)) # rows k, v
        self.rotary = Rotary(config) if config.rope_on_depth_k else nn.Identity()

    def forward(self, x):
        k, v = F.linear(x, self.weight).unflatten(-1, (2 * self.n_kv_head, -1)).transpose(1, 2).chunk(2, dim=1) # (B, Hkv, T, D)
        return self.rotary(k), v

class Block(nn.Module):

    def __init__(self, config, l):
        super().__init__()
        self.norm_attn = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = CausalSelfAttention(config)
        self.norm_mlp = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.kv_mlp = DepthKV(config) if l < config.n_layer - 1 else None # nobody reads the last one

    def forward(self, state):
        x, slots = state
        y, slot = self.attn(self.norm_attn(x), slots) # (B, T, C)
        x = x + y # (B, T, C)
        y = self.norm_mlp(x) # (B, T, C)
        x = x + self.mlp(y) # (B, T, C)
        return x, slots if self.kv_mlp is None else slots + (slot, self.kv_mlp(y))

class PostBlock(Block):

    def forward(self, state):
        x, slots = state
        y, slot = self.attn(x, slots) # (B, T, C)
        x = self.norm_attn(x + y) # (B, T, C)
        y = self.norm_mlp(x + self.mlp(x)) # (B, T, C)
        return y, slots if self.kv_mlp is None else slots + (slot, self.kv_mlp(x))

class GPT(nn.Module):
    NO_DECAY = () # endings of the parameter names that weight decay leaves alone
    MATRIX = ("attn.wqkv.weight", "attn.wo.weight", "mlp.w13.weight", "mlp.w2.weight", "kv_mlp.weight") # what Muon may take

    def __init__(self, config):
        super().__init__()
        if config.norm not in ("pre", "post"):
            raise ValueError(f"norm: {config.norm} is neither pre nor post")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList((Block if config.norm == "pre" else PostBlock)(config, l) for l in range(config.n_layer))
        self.norm_f = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._init_weights()

    def begin(self, x): # embedding -> state
        return x, ()

    def readout(self, x): # state -> what the final norm reads
        return x[0] # (B, T, C)

    def hidden(self, x, l): # state after l blocks -> the representation that analysis looks at
        return x[0] # (B, T, C)

    def depth_flops(self, T): # what the architecture adds to flops(T)
        c = self.config
        return 4 * T * c.n_embd * (c.n_layer - 1) * (c.n_kv_head * c.n_embd // c.n_head + c.n_layer) # the U_i; score and sum of 2l slots

    def init_depth(self): # rescales or draws, after the shared draw
        for block in self.h[:-1]:
            nn.init.trunc_normal_(block.kv_mlp.weight, std=0.02, a=-0.06, b=0.06)

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
