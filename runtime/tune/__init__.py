"""`paged tune`: one flag at a time, measured on the user's own workload, until nothing gains."""
