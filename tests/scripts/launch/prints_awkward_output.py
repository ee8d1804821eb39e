"""Print what outputs must survive."""

import os
import sys

if os.environ["RANK"] == "0":
    sys.stdout.buffer.write(b"binary \xff\xfe\x00 garbage\n")
    sys.stdout.buffer.write(b"x" * 200_000 + b"\n")
    sys.stdout.buffer.write(b"carriage return and newline\r\n")
    sys.stdout.flush()
    for percent in range(101):
        print(f"\rprogress {percent}%", end="", flush=True)
    print()
    print("to stderr", file=sys.stderr)
print("no newline", end="")
