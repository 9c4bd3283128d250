"""
Tiny data, tiny runs, and what a run did: shared by test_train.py and test_resume.py, and the script that torchrun starts for the latter.
Run alone: torchrun --standalone --nproc_per_node 2 tests/ddp_worker.py cases.json results
"""
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import train

TINY = dict(model="preln", n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=256, batch_tokens=128, micro_batch=4, steps=6, eval_every=0, eval_tokens=256,
            save_every=0, log_every=1, warmup_frac=0.34, device="cpu", fused="off")

def argv(**flags):
    return [f"--{k}={v}" for k, v in {**TINY, **flags}.items() if v is not None]

def shard(path, ids, dtype="<u2", magic=(20240520, 1), claim=None):
    # llm.c's header, or none where magic is None; claim: the count that the header says
    head = np.zeros(256 if magic else 0, "<i4")
    head[:3] = [*magic, len(ids) if claim is None else claim] if magic else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.tobytes() + np.asarray(ids).astype(dtype).tobytes())

def random_ids(n, vocab=256, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, n)

def make_data(path):
    for i, (name, n) in enumerate({"train_000000": 3000, "train_000001": 1111, "val_000000": 700}.items()):
        shard(path / f"{name}.bin", random_ids(n, seed=i))
    return path

def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b

def record(args, stop=None, twin=0):
    # train.main(args) -> its exit status, the tokens of every training step, the first gradients, the (step, micro-step)s that synced, the final weights.
    # stop: SIGTERM during this step, to the last rank alone. twin: micro-steps of a DDP that syncs on the first of them in place of the last
    tokens, grads, syncs, weights, step = [[]], [], [], [], 0
    batch, clip = train.Loader.batch, torch.nn.utils.clip_grad_norm_
    def read(self, windows):
        x, y = batch(self, windows)
        if isinstance(windows, list): # validation asks for a range
            tokens[-1] += [hashlib.sha1(bytes(row.numpy())).hexdigest() for row in torch.cat((x, y), 1)]
        return x, y
    def clipped(params, *rest):
        nonlocal step
        params, step = list(params), step + 1
        if step == 1:
            grads.extend(p.grad.clone() for p in params)
            weights.extend(params)
        if step == stop and int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        tokens.append([])
        return clip(params, *rest)
    class Net(DistributedDataParallel):
        def __init__(self, module):
            super().__init__(module)
            self.micro = 0
            self.register_comm_hook(None, self.sync)
        def sync(self, state, bucket):
            syncs.append((step, self.micro))
            return allreduce_hook(None, bucket)
        def forward(self, *xy):
            self.micro += 1
            if twin:
                self.require_backward_grad_sync = self.micro % twin == 1
            return super().forward(*xy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Loader, "batch", read)
        patch.setattr(torch.nn.utils, "clip_grad_norm_", clipped)
        patch.setattr(train, "DistributedDataParallel", Net)
        status = train.main(args)
    return dict(status=status, tokens=tokens[:-1], grads=grads, syncs=syncs, weights=[p.detach().clone() for p in weights])

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train.dist.init_process_group = train.dist.destroy_process_group = lambda *_: None # one group for all cases
    results = {}
    for case, (args, stop, twin) in json.loads(Path(sys.argv[1]).read_text()).items():
        results[case] = record(args, stop, twin)
    torch.save(results, f"{sys.argv[2]}.{dist.get_rank()}")
