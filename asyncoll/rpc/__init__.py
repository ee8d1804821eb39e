"""Remote calls: of functions at other ranks (`comm.rpc`), and of services outside of a world (`serve` and `connect`).

The parts, from the user to the wire: `ranks` and `outside` are the public interfaces. `exchange` is one end of RPC and
joins `client` (calls from here) and `server` (calls to here). `service` holds the registered functions, `stub` makes
proxies, `hints` reads annotations. `codec` turns values into bytes, `protocol` builds the messages, `failure` encodes
exceptions. A `carrier` moves the messages: `memory_carrier` between ranks of one host, `message_carrier` between any
ranks, `by_socket` between a service and its clients. The last two cut long messages into `segments`.
"""

from asyncoll.rpc.outside import Connection as Connection
from asyncoll.rpc.outside import connect as connect
from asyncoll.rpc.outside import serve as serve
from asyncoll.rpc.ranks import Rpc as Rpc
from asyncoll.rpc.service import Method as Method
from asyncoll.rpc.stub import Proxy as Proxy

__all__ = ["Connection", "Method", "Proxy", "Rpc", "connect", "serve"]
