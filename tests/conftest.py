import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1") # before kernels.py is imported
os.environ.setdefault("OMP_NUM_THREADS", "1") # tiny tensors: a second thread only waits, in the programs that tests start too
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch

torch.set_num_threads(1)

def pytest_collection_finish(session):
    gc.freeze() # what was imported and collected is no garbage: not looked through again at every collection

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    # three small shards of random ids, for the tests of train.py
    from ddp_worker import make_data
    return make_data(tmp_path_factory.mktemp("data"))

@pytest.fixture(scope="session", autouse=True)
def started(request, tmp_path_factory):
    # {file: what its start_early(directory) gave, a tuple}: programs that tests wait for with `early`, at work on the other core from the start
    modules = {item.module for item in request.session.items if "early" in item.fixturenames}
    programs = {m: m.start_early(tmp_path_factory.mktemp("early")) for m in modules}
    yield programs
    for started in programs.values():
        for process in (p for p in started if hasattr(p, "kill")):
            process.kill()

@pytest.fixture
def early(request, started):
    return started[request.module]

@pytest.fixture
def flags(data, tmp_path):
    # flags(flag=value, ...): the command line of a tiny run
    from ddp_worker import argv
    return lambda **kw: argv(**{"data": data, "out_dir": tmp_path, "run_name": "r", **kw})

@pytest.fixture
def interpreter(monkeypatch):
    # Triton's, without what makes it slow: it patches the language anew at every call of a helper, tl.sum too
    from triton.runtime import interpreter
    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()
    def patch_once(fn): # per launch and module
        if id(fn.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(fn.__globals__))
        return patch(fn)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **kwargs: done.clear() or launch(self, *args, **kwargs))
    return interpreter

@pytest.fixture
def chip(interpreter, monkeypatch):
    # the Triton kernels, interpreted; what a kernel does not write stays NaN
    import kernels
    monkeypatch.setattr(kernels, "on_chip", lambda x: True)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        def poisoned(*args, right=getattr(owner, name), **kwargs):
            y = right(*args, **kwargs)
            return y.fill_(float("nan")) if y.is_floating_point() else y
        monkeypatch.setattr(owner, name, poisoned)
    def nearest(x, a, b, mode, right=interpreter._convert_float): # as every device does; the interpreter truncates
        narrow = (a.name, b.name) == ("fp32", "bf16")
        return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy() if narrow else right(x, a, b, mode)
    monkeypatch.setattr(interpreter, "_convert_float", nearest)
