"""Registers the policy "all": a round begins when all ranks have arrived."""

from asyncoll.extending import register_policy

register_policy("all", lambda view: view.count() == view.size)
