"""Sum the ranks with torch.distributed, as a script that knows nothing of asyncoll would."""

import torch
import torch.distributed

torch.distributed.init_process_group("gloo")
total = torch.tensor([torch.distributed.get_rank() + 1])
torch.distributed.all_reduce(total)
print("sum", total.item(), "threads", torch.get_num_threads())
torch.distributed.destroy_process_group()
