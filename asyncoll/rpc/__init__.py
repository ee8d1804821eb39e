"""Calls of functions at other ranks (`comm.rpc`), and of services outside of any world (`serve` and `connect`)."""

from asyncoll.rpc.outside import Connection as Connection
from asyncoll.rpc.outside import connect as connect
from asyncoll.rpc.outside import serve as serve
from asyncoll.rpc.ranks import Rpc as Rpc
from asyncoll.rpc.service import Method as Method
from asyncoll.rpc.stub import Proxy as Proxy

__all__ = ["Connection", "Method", "Proxy", "Rpc", "connect", "serve"]
