"""The runtime of one rank: its endpoint, executions by message, pending calls, failures and progress thread."""
