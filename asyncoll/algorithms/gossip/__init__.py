"""Gossip: exchanges of each rank with a few others, for decentralised SGD. `docs/design/gossip.md` has the design."""
