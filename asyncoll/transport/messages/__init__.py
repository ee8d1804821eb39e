"""Messages between any two ranks: ZeroMQ, in-process and simulated transports, and what guards their sockets."""
