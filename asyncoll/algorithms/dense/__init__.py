"""The dense collectives, by message and in memory."""
