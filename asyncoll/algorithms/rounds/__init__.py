"""Wait-avoiding rounds: solo, majority, quorum and group allreduces."""
