"""Messages between any two ranks: ZeroMQ, in-process and simulated transports, and authentication at sockets."""
