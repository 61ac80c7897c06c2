"""What `paged bench` does: fixed workloads, offline and over HTTP, and the numbers they give."""
