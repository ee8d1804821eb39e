"""Python imports this at its start if this folder is in PYTHONPATH. So torch.cuda is the stand-in in such processes."""

import stand_in_cuda  # noqa: F401
