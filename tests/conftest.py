import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1") # before kernels.py is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

torch.set_num_threads(1) # tiny tensors: a second thread only waits
