"""`asyncoll bench`: how fast, and whether right. Every measured result is checked; `#wrong` counts bad elements.

commands ── what the user asks for        worlds ── where it runs        table ── how it is shown
plan     ── what every rank is told       dense, skewed ── what is measured
"""
