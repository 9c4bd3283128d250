"""
Depth mixing at the limit of memory and traffic. The model file is the specification; its one hot function is swapped for the
same-named, same-signature one from here by fuse(module), out loud.
"""
import ast
import inspect
from pathlib import Path

from kernels_sources import attnres_begin, attnres_mix, attnres_push, lm_loss, moda_depth_attention
from kernels_streams import hc_connect, mgr_connect, mhc_connect

# -----------------------------------------------------------------------------
# Swapping

FUSED = { # model file: what is swapped, what the swap takes for granted, on which devices it is known to gain
    "model_hc.py": (dict(connect=hc_connect), ("HyperConnection", "settle"), ("cpu", "cuda")),
    "model_mhc.py": (dict(connect=mhc_connect), ("HyperConnection", "settle"), ("cpu", "cuda")),
    "model_mgr.py": (dict(connect=mgr_connect), ("MultiGate", "settle"), ("cpu", "cuda")),
    "model_attnres.py": ({"GPT.begin": attnres_begin, "push": attnres_push, "mix": attnres_mix}, ("DepthSoftmax", "Block"), ("cpu", "cuda")),
    "model_moda.py": (dict(depth_attention=moda_depth_attention), ("CausalSelfAttention", "DepthKV"), ("cpu", "cuda"))}

def definitions(text):
    return {n.name: ast.get_source_segment(text, n) for n in ast.parse(text).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}

def match(module):
    # the model file whose hot functions and what they rest on stand in module to the letter, so that a fork is never fused by mistake
    mine = definitions(inspect.getsource(module))
    for name, (swaps, needs, devices) in FUSED.items():
        path = Path(__file__).with_name(name)
        if path.exists() and all(mine.get(k) == v for k, v in definitions(path.read_text(encoding="utf-8")).items() if k in (*swaps, *needs)):
            return name, swaps, devices
    return None, {}, ()

def gains(module, device):
    # --fused auto: a fixed table; the loss in chunks saves memory where the vocabulary is large, and that is on CUDA
    return device in match(module)[2] or device == "cuda"

def fuse(module, say=print):
    # swaps the hot functions of a model module, returns the function that swaps them back; a fork with other ones is refused
    name, swaps, _ = match(module)
    hot = [k for k in ("connect", "push", "mix", "depth_attention") if hasattr(module, k)]
    if hot and name is None:
        raise ValueError(f"{module.__name__}: {', '.join(hot)} or what it rests on is not what kernels.py was written for")
    before = {}
    for key, new in {**swaps, "lm_loss": lm_loss}.items():
        owner, _, attr = key.rpartition(".")
        owner = getattr(module, owner) if owner else module
        before[owner, attr] = getattr(owner, attr)
        setattr(owner, attr, new)
        say(f"fused: {module.__name__}.{key}")
    def undo():
        for (owner, attr), old in before.items():
            setattr(owner, attr, old)
    return undo
