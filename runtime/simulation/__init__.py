"""What `paged simulate` does: a fleet of engines on a clock of its own, without a device."""
