"""Calls of functions at other ranks, and of services outside of any world."""
