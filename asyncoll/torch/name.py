"""The name of the backend, as in `torch.distributed.init_process_group("asyncoll")`.

`import torch` imports this module: it imports nothing.
"""

NAME = "asyncoll"
DEVICES = ["cpu", "cuda"]  # whose tensors it takes
