"""
Tiny data, tiny runs, and what a run did: shared by the tests of train.py; and the script that torchrun starts for test_resume.py.
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

def ckpt(run):
    return torch.load(run / "ckpt.pt", weights_only=True)

def log(run):
    # its objects, without what depends on the machine
    return [{k: v for k, v in json.loads(line).items() if k not in ("ms", "tok_per_s")} for line in (run / "log.jsonl").read_text().splitlines()]

def same_end(a, b):
    # two run directories: the same weights, optimizer state and random state to the bit, and the same log
    x, y = ckpt(a), ckpt(b)
    return all(same(x[k], y[k]) for k in ("model", "optimizers", "step", "rng")) and log(a) == log(b)

def refused(capsys, args, *words):
    # train.main(args) ends in one line that holds these words -> the line
    with pytest.raises(SystemExit) as e:
        train.main(args)
    err = capsys.readouterr().err
    assert e.value.code in (1, 2) and err.startswith("error: ") and err.count("\n") == 1 and all(str(w) in err for w in words), err
    return err

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

def gradients(rank=None):
    # of attnres with random queries, in FP64, over four micro-batches; by a rank of two: fused, two of them, the first without communication
    import kernels
    model = train.build("attnres", n_layer=5, n_head=2, n_embd=24, vocab_size=61, block_size=9).double()
    random = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=random, dtype=p.dtype) * (p.numel() ** -0.5 if p.ndim == 1 else 0.1)
    batches = torch.randint(61, (4, 2, 9), generator=random)
    if rank is None:
        for x in batches:
            (model(x, x)[1] / 2).backward()
    else:
        undo = kernels.fuse(sys.modules[type(model).__module__], say=lambda text: None)
        net = DistributedDataParallel(model)
        with net.no_sync():
            net(batches[2 * rank], batches[2 * rank])[1].backward()
        net(batches[2 * rank + 1], batches[2 * rank + 1])[1].backward()
        undo()
    return {n: p.grad for n, p in model.named_parameters()}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train.dist.init_process_group = train.dist.destroy_process_group = lambda *_: None # one group for all cases
    results = {}
    for case, (args, stop, twin) in json.loads(Path(sys.argv[1]).read_text()).items():
        results[case] = record(args, stop, twin)
    results["no sync"] = gradients(dist.get_rank())
    torch.save(results, f"{sys.argv[2]}.{dist.get_rank()}")
