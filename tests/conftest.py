import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1") # before kernels.py is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch

torch.set_num_threads(1) # tiny tensors: a second thread only waits

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    # three small shards of random ids, for test_train.py and test_resume.py
    from ddp_worker import make_data
    return make_data(tmp_path_factory.mktemp("data"))
