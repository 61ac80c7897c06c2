"""Many replicas of a server behind one address, by way of Ray Serve."""
