"""Note this process in the folder of the argument, and end as the pipe of the rank there says."""

import os
import sys
from pathlib import Path

pipe = Path(sys.argv[1], f"end-{os.environ['RANK']}")
os.mkfifo(pipe)
Path(sys.argv[1], f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
print("ready", flush=True)
match pipe.read_text():
    case "raise":
        raise ValueError("it is unwell")
    case "exit":
        sys.exit(3)
